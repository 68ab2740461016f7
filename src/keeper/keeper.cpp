// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/keeper/finish-inl.h"
#include "kvkeep/keeper/fold-inl.h"
#include "kvkeep/keeper/keeper-inl.h"
#include "kvkeep/keeper/keeper_observe-inl.h"
#include "kvkeep/keeper/narrow-inl.h"
