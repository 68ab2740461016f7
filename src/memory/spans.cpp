// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/memory/factorise-inl.h"
#include "kvkeep/memory/span_row-inl.h"
