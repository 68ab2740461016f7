// SPDX-License-Identifier: Apache-2.0
// Bodies of this room, compiled once for the library.

#include "kvkeep/parts/prompts-inl.h"
