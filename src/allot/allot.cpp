// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/allot/allocator-inl.h"
#include "kvkeep/allot/mass_segmented-inl.h"
