// SPDX-License-Identifier: Apache-2.0
#pragma once
/// kvkeep decides which entries of an LLM's key-value cache stay, and moves them. What every engine writes, in reading
/// order. Scorers, allocators, parts and prefill policies are taken by name in a policy's text; a program that composes
/// them in C++ includes their headers (docs/inside/design.md lists the rooms).

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/paged_sequences.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/observe/observation.h"
#include "kvkeep/parts/part.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/policy.h"

// What kvkeep::header_only lacks: policies by name, saved state.
#ifndef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/registry.h"
#endif
#if KVKEEP_FILES
#include "kvkeep/state/state_file.h"
#endif
