// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/layers/layer_selector-inl.h"
#include "kvkeep/layers/prompt_scores-inl.h"
