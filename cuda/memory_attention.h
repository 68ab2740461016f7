// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Attention over folded spans on a GPU: decides which spans every query opens, brings their factors near, and merges
/// all of it into softmaxes over rows that were read before. Same decisions as kvkeep::read_memory(). No LibTorch in
/// here.

#include <cstddef>
#include <cstdint>
#include <limits>

#include "evidence.h"
#include "fetch.h"
#include "kvkeep/memory/factors.h"
#include "stream.h"

namespace kvkeep::cuda {

/// One folded span of a row: kvkeep::FoldedSpan.
struct MemorySpan {
  std::int32_t length = 0;       ///< tokens; 0: none, and FoldedRow::log_length is -inf
  std::int64_t first_token = 0;  ///< tokens in the spans before it
  std::int64_t bytes = 0;        ///< of its blob; 0: it has none
  SpanFactors factors[2] = {};   ///< of keys, of values
};

/// The spans of one (sequence, KV head) in a layer, kvkeep::SpanRow, and the queries that read them. Pointers are to
/// the device.
struct FoldedRow {
  std::int32_t spans = 0;
  std::int32_t head = 0;         ///< KV head
  std::int32_t first_query = 0;  ///< tokens first_query to first_query + queries - 1 read it
  std::int32_t queries = 0;
  double entries = std::numeric_limits<double>::infinity();  ///< kvkeep::Reading
  double resident = 0;
  double vacant = 0;                         ///< what a span without tokens has in `resident`; 0: there is none
  const MemorySpan* table = nullptr;         ///< [spans]
  const std::byte* coarse_keys = nullptr;    ///< store [spans, D]
  const std::byte* coarse_values = nullptr;  ///< store [spans, D]
  const float* log_length = nullptr;         ///< f32 [spans]
  const std::uint32_t* signs = nullptr;      ///< kvkeep::KeySketch of the tokens of all spans; null: none
  const std::uint16_t* sizes = nullptr;      ///< bf16 [tokens]
  const float* norms = nullptr;              ///< f32 [spans, group] launch_router_norms(); null: no router is learned
  float* dense = nullptr;                    ///< f32 [group] log-sum-exps over rows that its last query had, which
                                             ///< launch_memory_guess expects again; null: not kept, counts as -inf
  const std::byte* const* far = nullptr;     ///< [spans] blobs in page-locked host memory
  const std::byte** near = nullptr;          ///< [spans] where launch_memory_merge reads blobs that are opened
  std::byte* arena = nullptr;                ///< what launch_memory_pieces hands out, a multiple of 16
  std::int64_t arena_bytes = 0;

  /// Whether span s has tokens.
  [[nodiscard]] KVKEEP_HD bool holds(std::int32_t s) const { return vacant == 0 || log_length[s] >= 0; }
};

/// A layer's memory: rows of all its sequences, and queries of all their tokens.
struct MemoryAttentionArguments {
  const FoldedRow* rows = nullptr;  ///< [count], no two of one token and KV head
  std::int32_t count = 0;
  std::int32_t most_spans = 0;    ///< of a row, or more
  std::int32_t most_queries = 0;  ///< of a row, or more
  std::int32_t tokens = 0;        ///< of all sequences
  std::int32_t kv_heads = 1;
  std::int32_t group = 1;              ///< query heads per KV head
  std::int32_t dim = 0;                ///< 1 to 256
  Element store = Element::f32;        ///< of coarse entries and blobs: f32, f16 or bf16
  Element query = Element::f32;        ///< f32, f16 or bf16
  float scale = 1;                     ///< of the softmax
  const std::byte* queries = nullptr;  ///< [tokens, Hq, D] after RoPE
  std::int64_t token_stride = 0;       ///< bytes
  std::int64_t head_stride = 0;        ///< bytes

  bool keeps_near = true;           ///< FoldedRow::near says what lies near already; false: it is only written
  std::int64_t* brought = nullptr;  ///< i64 [count] bytes of the arenas that launch_memory_pieces has handed out;
                                    ///< needed for launch_memory_guess
  bool late = false;  ///< launch_memory_pieces lists what is missing still: it goes on in the arenas at `brought`, and
                      ///< what it, or the caller, brought near stays there

  /// kvkeep::ZoomOptions::Rule
  enum class Rule : std::uint8_t { mass, coverage, learned };
  Rule rule = Rule::mass;
  double mass = 0.02;                 ///< kvkeep::ZoomOptions
  double coverage = 0.9;              ///< the same
  double coverage_floor = 0.001;      ///< the same
  const float* routed = nullptr;      ///< by `learned`: f32 [tokens, Hq, D] launch_router_queries()
  const float* thresholds = nullptr;  ///< then: f32 [Hq] the router's
  std::int32_t inner = 1;             ///< then: its d'
  bool share = false;                 ///< Heads::group
  bool per_head = false;              ///< kvkeep::Reading

  float* out = nullptr;  ///< f32 [tokens, Hq, D] attention over the dense rows
  float* lse =
      nullptr;  ///< f32 [tokens, Hq] log of its sum of exponentials; -inf: there was no row, and `out` counts as 0
  std::uint8_t* marks =
      nullptr;  ///< u8 [tokens, Hq, most_spans] 1 if a head has opened a span; written up to a row's spans
  std::int32_t* opened =
      nullptr;  ///< i32 [tokens, Hkv, most_spans] spans that some head of the group has opened, ascending
  std::int32_t* opened_count = nullptr;  ///< i32 [tokens, Hkv] how many
  void* workspace =
      nullptr;  ///< memory_attention_workspace_bytes(), aligned to 32; from launch_memory_route to launch_memory_merge

  [[nodiscard]] KVKEEP_HD std::int32_t query_heads() const { return kv_heads * group; }
};

/// Per token: 8 for each query head and span, 17 for each KV head and span, and 4 (D + 2) for each query head and part
/// of a row, of which there are up to 32 if there are few rows and queries. With `brought` 4 more for each query head
/// and span.
[[nodiscard]] std::int64_t memory_attention_workspace_bytes(const MemoryAttentionArguments& arguments);

/// Writes marks, opened and opened_count; reads queries, lse and what is near of the rows. A span is wanted if its
/// share of all mass is above `mass`, as predicted by its sketch if there is one, else by its coarse entry; by
/// `coverage`, if it is among those of the largest shares, none below `coverage_floor`, that first hold that much of
/// what all spans draw; by `learned`, if its relevance is above the threshold of the query head. Within the budget the
/// most relevant go first, the lower span at equal relevance, and one that does not fit is skipped. Agrees with the CPU
/// unless a share is within 1e-5 of `mass` or the floor, a sum of shares of `coverage`, a relevance of its threshold,
/// or two that compete are that close. 2 launches. Cost: the coarse keys and sketches once for 8 query heads, the keys
/// twice by `learned`; a sort of the wanted spans if they do not all fit, and by `coverage` one for every query head.
/// Throws InvalidArgument for sizes below 0, a head size outside 1 to 256, no head, other dtypes, and by `learned`
/// without a router's numbers.
void launch_memory_route(const MemoryAttentionArguments& arguments, Stream stream);

/// The same in two halves, the first of them before `lse` is known, while attention reads the rows: what is fetched
/// meanwhile need not be fetched afterwards. Guesses marks, opened and opened_count as if rows drew from each query
/// what they drew from the last one (FoldedRow::dense), for launch_memory_pieces. Requires: `brought`; a
/// launch_memory_open with the same arguments after it, on the same workspace. 2 launches. Cost, and throws, as
/// launch_memory_route; throws without `brought`, too.
void launch_memory_guess(const MemoryAttentionArguments& arguments, Stream stream);

/// The second half, with `lse`: the same marks, opened and opened_count as of launch_memory_route, bit for bit. Does
/// not read keys and sketches again. 1 launch. Throws as launch_memory_guess.
void launch_memory_open(const MemoryAttentionArguments& arguments, Stream stream);

/// Lists what to fetch of the opened spans (launch_fetch), and writes to `near` where it will be: `pieces`
/// [count][most_spans], `counts` [count], for each row. A row's arena is handed out from its beginning: what was there,
/// and what was read from afar, is no longer near. Spans whose `near` points elsewhere stay there and are not fetched,
/// unless keeps_near is false.
/// What does not fit into the arena is read in place, over the bus: the same answer, later. 1 launch. Not needed if the
/// caller fills `near`. Throws as launch_memory_route.
void launch_memory_pieces(const MemoryAttentionArguments& arguments, FarPiece* pieces, std::int32_t* counts,
                          Stream stream);

/// Merges the spans into (out, lse), in place: opened ones token by token from their factors, without a row being
/// formed, the others as their coarse entries. Rows without spans are left as they are. Requires: launch_memory_route
/// or launch_memory_open with the same arguments before it, on the same workspace. 2 launches. Cost: the coarse values
/// and the factors of opened spans once for 8 query heads. Rounding depends on how many parts a row is cut into, and so
/// on how many rows and queries go together. Throws as launch_memory_route.
void launch_memory_merge(const MemoryAttentionArguments& arguments, Stream stream);

}  // namespace kvkeep::cuda
