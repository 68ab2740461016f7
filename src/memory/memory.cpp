// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/memory/router-inl.h"
#include "kvkeep/memory/row_zoom-inl.h"
