// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Reading a memory of folded spans: which of them each query opens, and all of them in one softmax with the rows that
/// stayed. Source: SeKV (AmirAbaskohi/SeKV). Differs: the heads that share keys share a budget and never exceed it; if
/// resident entries alone exceed it, nothing opens (the published code raises an error); an opened span is read in
/// factored form, so no token row is formed; entries that do not count are left out (published: 1e-6 of them stays).

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvkeep/core/decision.h"
#include "kvkeep/memory/router.h"

namespace kvkeep {

/// Softmaxes that are still open: entries may be merged into them in any order, with the same result up to rounding.
struct OpenAttention {
  Tensor top;  ///< f32 [n, Hq] largest logit so far; -inf: no entry
  Tensor sum;  ///< f32 [n, Hq] sum of exp(logit - top)
  Tensor out;  ///< f32 [n, Hq, D] sum of exp(logit - top) * value
};

/// One row of a layer, as it is read.
struct MemoryRow {
  const SpanRow* spans = nullptr;
  std::int64_t dense = 0;  ///< entries that the row holds besides them
};

/// How a layer's memory is read.
struct Reading {
  ZoomOptions zoom = {};
  const Router* router = nullptr;                            ///< of the layer; null: none
  double entries = std::numeric_limits<double>::infinity();  ///< of one KV head that may be in reach at once: dense
                                                             ///< ones, coarse ones and those of opened spans
  double entries_per_span = 1;                               ///< what a folded span counts as
  double entries_per_token = 0;                              ///< what every token in it adds
  bool per_head = false;  ///< each query head has `entries` to itself, and opening a span takes L - 1 (published)
};

/// Merges the folded spans of one layer and sequence into softmaxes that are open over its rows: each query opens the
/// spans that the rule names, as far as the budget allows; the others are read as their coarse entries. rows: [Hkv];
/// queries: f32, f16 or bf16 [n, Hq, D] after RoPE; each sees every span. `opened`: if not null, [Hkv] the spans that
/// the last query opened; `by_head`: [Hkv] or empty, to which the counts of each are added. Throws InvalidArgument for
/// other shapes and a router of other heads; `open` is of no use then. Cost
/// per query and KV head: the coarse keys and values once; the factors of opened spans. Queries and KV heads in
/// parallel.
ReadCounts read_memory(OpenAttention& open, std::span<const MemoryRow> rows, const Tensor& queries, double scale,
                       const Reading& reading, std::vector<std::vector<std::int32_t>>* opened = nullptr,
                       std::span<ReadCounts> by_head = {});

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/row_zoom.h"  // and, after it, the bodies of this file
#endif
