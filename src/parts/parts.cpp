// Bodies of this room, compiled once for the library.

#include "kvkeep/parts/prompts-inl.h"
