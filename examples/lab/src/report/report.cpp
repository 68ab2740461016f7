// SPDX-License-Identifier: Apache-2.0
// Bodies of this room's headers, compiled once for the library.

#include "kvlab/fidelity-inl.h"
#include "kvlab/intervals-inl.h"
