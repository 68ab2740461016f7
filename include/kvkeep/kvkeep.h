#pragma once
/// kvkeep decides which entries of an LLM's key-value cache stay, and moves them. The public API in reading order.

// Vocabulary: errors, tensors, the model, the cache, the columns that travel with the rows.
#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/decision.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/fields.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/core/protect.h"
#include "kvkeep/core/row.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/keep/columns.h"
#include "kvkeep/score/evidence.h"
#include "kvkeep/score/pool.h"
#include "kvkeep/score/window.h"

// observe
#include "kvkeep/observe/observation.h"
#include "kvkeep/observe/query_ring.h"
#include "kvkeep/observe/trigger.h"

// decide: score, allot, select
#include "kvkeep/allot/adaptive_heads.h"
#include "kvkeep/allot/allocator.h"
#include "kvkeep/allot/chunks.h"
#include "kvkeep/allot/critical.h"
#include "kvkeep/allot/mass.h"
#include "kvkeep/allot/mass_segmented.h"
#include "kvkeep/allot/pyramid.h"
#include "kvkeep/allot/quotas.h"
#include "kvkeep/allot/segments.h"
#include "kvkeep/allot/threshold.h"
#include "kvkeep/keep/select.h"
#include "kvkeep/score/cur.h"
#include "kvkeep/score/defensive.h"
#include "kvkeep/score/expected.h"
#include "kvkeep/score/given.h"
#include "kvkeep/score/h2o.h"
#include "kvkeep/score/keydiff.h"
#include "kvkeep/score/knorm.h"
#include "kvkeep/score/random.h"
#include "kvkeep/score/recency.h"
#include "kvkeep/score/rkv.h"
#include "kvkeep/score/row_scorer.h"
#include "kvkeep/score/rpc.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/score/snapkv.h"
#include "kvkeep/score/tova.h"
#include "kvkeep/score/triattention.h"
#include "kvkeep/score/vase.h"
#include "kvkeep/score/window_attention.h"

// prefill: finds the layer in which the ranks settle
#include "kvkeep/layers/layer_selector.h"
#include "kvkeep/layers/prompt_scores.h"

// folded spans
#include "kvkeep/memory/factorise.h"
#include "kvkeep/memory/factors.h"
#include "kvkeep/memory/memory_options.h"
#include "kvkeep/memory/read_memory.h"
#include "kvkeep/memory/router.h"
#include "kvkeep/memory/segmenter.h"
#include "kvkeep/memory/span_row.h"

// apply
#include "kvkeep/keep/compact.h"
#include "kvkeep/keep/paged_sequences.h"
#include "kvkeep/keep/pages.h"

// The policies, and the pipeline itself.
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/parts/folds.h"
#include "kvkeep/parts/given.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/parts/prompts.h"
#include "kvkeep/parts/surprisal.h"
#include "kvkeep/policy/asl.h"
#include "kvkeep/policy/evict.h"
#include "kvkeep/policy/folded_memory.h"
#include "kvkeep/policy/gemfilter.h"
#include "kvkeep/policy/machine.h"
#include "kvkeep/policy/policy.h"
#include "kvkeep/policy/prefill.h"
#include "kvkeep/policy/pyramidinfer.h"
#include "kvkeep/policy/sekv.h"

// What kvkeep::header_only lacks: saved state, policies by name.
#ifndef KVKEEP_HEADER_ONLY
#include "kvkeep/policy/across_ranks.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/state/state_file.h"
#endif
