// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/layers/last_query-inl.h"
#include "kvkeep/layers/layer_selector-inl.h"
#include "kvkeep/layers/prompt_scores-inl.h"
#include "kvkeep/layers/shrinking_context-inl.h"
#include "kvkeep/layers/top_mass-inl.h"
