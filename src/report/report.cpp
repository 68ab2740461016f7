// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/report/fidelity-inl.h"
#include "kvkeep/report/intervals-inl.h"
