#pragma once
/// Attention over a memory whose spans are folded: dense rows, one entry for a folded span, its factors for a zoomed
/// one, all in one softmax. Source: SeKV (AmirAbaskohi/SeKV). Differs: a zoomed span is read in factored form, so no
/// token row is formed; entries that do not count are left out (published: 1e-6 of them stays).

#include "kvkeep/memory/span_store.h"

namespace kvkeep {

/// What one layer remembers of a prompt.
struct SpanMemory {
  Segments segments;
  Tensor dense_keys, dense_values;  ///< [Hkv, dense, D] of segments.dense(), in the dtype they came in
  SpanStore spans;

  /// Bytes of tensors near the device: dense rows and SpanStore::near_bytes().
  [[nodiscard]] std::int64_t near_bytes() const;
};

/// keys, values: f32, f16 or bf16 [Hkv, T, D], keys after RoPE. Copies the dense rows and folds the spans. Throws and
/// costs as SpanStore.
[[nodiscard]] SpanMemory fold_prompt(const Tensor& keys, const Tensor& values, std::span<const float> surprisal,
                                     Segments segments, const FactorOptions& options = {},
                                     const RankGates* gates = nullptr);

/// Softmaxes that are still open: entries may be merged into them in any order, with the same result up to rounding.
struct OpenAttention {
  Tensor top;  ///< f32 [n, Hq] largest logit so far; -inf: no entry
  Tensor sum;  ///< f32 [n, Hq] sum of exp(logit - top)
  Tensor out;  ///< f32 [n, Hq, D] sum of exp(logit - top) * value

  /// f32 [n, Hq, D]; 0 if there was no entry.
  [[nodiscard]] Tensor close() const;
  /// f32 [n, Hq] log of the sum of exp(logit) over the entries.
  [[nodiscard]] Tensor log_mass() const;
};

/// Attention of queries over dense rows. keys, values: f32, f16 or bf16 [Hkv, T, D]; queries: f32, f16 or bf16 [n, Hq,
/// D] after RoPE; every query sees every row. Query head h reads KV head h / (Hq / Hkv). Throws InvalidArgument for
/// other shapes and dtypes. Cost: 4 * n * Hq * T * D flop; queries and KV heads in parallel.
[[nodiscard]] OpenAttention attend_rows(const Tensor& keys, const Tensor& values, const Tensor& queries, double scale);

/// f32 [n, Hq, spans]: logit of the coarse entry of every span, with the logarithm of its length. Throws as
/// attend_rows(). Cost: one matrix product.
[[nodiscard]] Tensor coarse_logits(const SpanStore& spans, const Tensor& queries, double scale);

/// Merges every span into `open`: as its coarse entry, with its logit from `coarse` (coarse_logits()), if `zoomed` (u8
/// [n, Hq, spans]) is 0, else token by token from its factors. Throws InvalidArgument for other shapes. Cost per zoomed
/// span and head: one multiply-add for each number of its factors, or of its rows.
void merge_spans(OpenAttention& open, const SpanStore& spans, const Tensor& queries, double scale, const Tensor& coarse,
                 const Tensor& zoomed);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/router.h"  // and, after it, the bodies of this file
#endif
