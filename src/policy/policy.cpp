// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/policy/evict-inl.h"
#include "kvkeep/policy/host-inl.h"
