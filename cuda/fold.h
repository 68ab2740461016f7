// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What an event folds, on a GPU: which slots every row drops, the matrices of their spans, and the spans as attention
/// reads them. Between the three: launch_factorise. No LibTorch in here.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "evidence.h"
#include "factorise.h"
#include "memory_attention.h"
#include "stream.h"

namespace kvkeep::cuda {

/// The slots of one row that fold, all that it drops, and where their spans go. Pointers are to the device.
struct FoldingRow {
  std::int32_t row = 0;         ///< of the event
  std::int32_t first_span = 0;  ///< spans of the rows before it
  std::int32_t spans = 0;       ///< its own; those past what launch_fold_cut() finds are empty
  std::int64_t first_slot = 0;  ///< of its slots among those of all rows

  MemorySpan* table = nullptr;         ///< [spans] what FoldedRow::table has from its first new span on; so the others
  std::byte* coarse_keys = nullptr;    ///< store [spans, D]
  std::byte* coarse_values = nullptr;  ///< store [spans, D]
  float* log_length = nullptr;         ///< f32 [spans]
  const std::byte** far = nullptr;     ///< [spans]
  std::uint32_t* signs = nullptr;      ///< the row's sketch from its first token on; null: none is drawn
  std::uint16_t* sizes = nullptr;      ///< bf16
  float* norms = nullptr;              ///< f32 [spans, group] launch_router_norms(); null: no router is learned
  std::int64_t first_token = 0;        ///< tokens in the row's earlier spans
  std::byte* blobs = nullptr;          ///< page-locked host memory, a multiple of 16: one blob after the other
  std::int64_t blob_bytes = 0;         ///< from one to the next: folded_blob_bytes() of the longest span
};

/// One of a row's spans: some of the slots that it drops, one after the other.
struct FoldingSpan {
  FoldingSpan() = default;
  KVKEEP_HD FoldingSpan(std::int32_t of, std::int32_t from, std::int32_t slots)
      : row(of),
        begin(from),
        length(slots),
        log_length(static_cast<float>(std::log(static_cast<double>(slots)))),
        weight(1.0 / slots) {}

  std::int32_t row = 0;     ///< among FoldingRow
  std::int32_t begin = 0;   ///< among the slots that the row drops
  std::int32_t length = 0;  ///< 0: an empty one, which draws nothing
  float log_length = 0;
  double weight = 0;  ///< of a slot in the coarse entry, if all are equal
};

/// Some spans of an event, side by side. Everything on the device but the struct itself.
struct FoldArguments {
  const FoldingRow* folding = nullptr;  ///< [count]
  std::int32_t count = 0;
  const FoldingSpan* pieces = nullptr;   ///< of all rows, in their order
  const Row* rows = nullptr;             ///< of the event
  const std::int32_t* kept = nullptr;    ///< i32 slots that stay, ascending in each row
  const std::int64_t* indptr = nullptr;  ///< i64 [rows + 1] where each row's are
  std::int32_t longest = 0;              ///< slots of the longest row, or more
  std::int32_t* slots = nullptr;         ///< i32 slots that fold, each row's from FoldingRow::first_slot on
  const float* weights = nullptr;        ///< f32 the same: of each in its span's coarse entry (kvkeep::span_weights());
                                         ///< null: all equal
  bool listed = false;                   ///< `slots` are the caller's: launch_fold_slots() is not needed
  std::int32_t dim = 0;                  ///< D, 1 to 256
  Element keys = Element::f32;           ///< of the cache: f32, f16 or bf16
  Element store = Element::f32;          ///< of what is stored: the same
  std::int32_t first = 0, spans = 0;     ///< spans first to first + spans - 1 of all rows
  std::int64_t numbers = 0;              ///< room of a matrix in `factors`, a multiple of 8
  RowMatrix* matrices = nullptr;         ///< [2, spans] of keys, of values
  const FactorsFound* found = nullptr;   ///< [2, spans]
  const std::byte* coarse = nullptr;     ///< store [2, spans, D]
  const std::byte* factors = nullptr;    ///< store [2, spans, numbers], a multiple of 16
};

/// How launch_fold_cut() cuts spans where segments end. On the device.
struct FoldCut {
  const std::int32_t* ends = nullptr;  ///< i32 [rows of the event, most] MassSegmentedArguments::ends
  std::int64_t most = 0;
  std::int32_t min_span = 1, max_span = 1;  ///< kvkeep::SpanCut
  FoldingSpan* pieces = nullptr;            ///< out: FoldArguments::pieces
  const float* mass = nullptr;              ///< f32 flat over the event's rows; null: slots weigh alike
  float* weights = nullptr;                 ///< out, with `mass`: FoldArguments::weights
};

/// Most bytes of a blob of keys and values, whose values begin at a multiple of 8 numbers; a multiple of 16.
[[nodiscard]] std::int64_t folded_blob_bytes(std::int64_t length, std::int64_t dim, const FactorOptions& options,
                                             Element store);

/// Writes `slots`: those of every row that do not stay, ascending. Reads folding, rows, kept and indptr. One launch.
/// Throws InvalidArgument, as the others, for negative sizes, a head size outside 1 to 256 and 8-bit numbers.
void launch_fold_slots(const FoldArguments& arguments, Stream stream);

/// Writes `pieces`, FoldingRow::spans of each row: one span for each segment that drops slots, short ones joined, long
/// ones cut, then empty ones; with `mass` their weights, too. After launch_fold_slots(). The CPU's spans. One launch,
/// one block per row. Throws as the others, and for spans below 1.
void launch_fold_cut(const FoldArguments& arguments, const FoldCut& cut, Stream stream);

/// Writes `matrices` of the spans. One launch.
void launch_fold_matrices(const FoldArguments& arguments, Stream stream);

/// Stores the spans once they are factorised: tables, coarse entries, sketches (kvkeep::KeySketch) and blobs. The cache
/// must still be as it was. At most 2^31 - 1 spans.
/// A sketch has the CPU's bits where a key is not within rounding of its coarse entry, sizes to 1e-2. One launch, one
/// block per span. Cost: the keys once; the factors once more, over the bus.
void launch_fold_spans(const FoldArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
