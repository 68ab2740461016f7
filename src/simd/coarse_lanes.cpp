#include "kvkeep/simd/coarse_lanes-inl.h"
