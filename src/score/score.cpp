// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/score/rkv-inl.h"
#include "kvkeep/score/window_attention-inl.h"
