// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/keep/compact-inl.h"
#include "kvkeep/keep/paged_sequences-inl.h"
#include "kvkeep/keep/pages-inl.h"
#include "kvkeep/keep/select-inl.h"
