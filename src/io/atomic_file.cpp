// Bodies of this room's headers, compiled once for the library.

#include "kvkeep/io/atomic_file-inl.h"
