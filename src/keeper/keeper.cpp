// SPDX-License-Identifier: Apache-2.0
// Bodies of this room, compiled once for the library.

#include "kvkeep/keeper/keeper-inl.h"
#include "kvkeep/keeper/observer-inl.h"
