// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Included by headers whose functions kvkeep::header_only lacks.

#include "kvkeep/core/hd.h"

#ifdef KVKEEP_HEADER_ONLY
#error "kvkeep: the functions of this header are compiled; link kvkeep::kvkeep instead of kvkeep::header_only"
#endif
