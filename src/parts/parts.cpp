// Bodies of this room, compiled once for the library.

#include "kvkeep/parts/folds-inl.h"
#include "kvkeep/parts/given-inl.h"
#include "kvkeep/parts/part-inl.h"
#include "kvkeep/parts/pins-inl.h"
#include "kvkeep/parts/prompts-inl.h"
