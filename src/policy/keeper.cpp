// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/policy/finish-inl.h"
#include "kvkeep/policy/fold-inl.h"
#include "kvkeep/policy/folded_memory-inl.h"
#include "kvkeep/policy/give-inl.h"
#include "kvkeep/policy/keeper-inl.h"
#include "kvkeep/policy/keeper_observe-inl.h"
#include "kvkeep/policy/narrow-inl.h"
#include "kvkeep/policy/pin-inl.h"
