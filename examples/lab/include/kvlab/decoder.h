// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The reference decoder: Llama, Qwen2, Qwen3, SmolLM3 and Gemma 3 on a CPU or a GPU, over a cache, dense or in pages,
/// that the caller owns and may cut between steps.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <kvkeep/parts/folds.h>
#include "kvkeep/core/cache_view.h"
#include "kvkeep/io/model_config.h"
#include "kvkeep/observe/observation.h"
#include "kvlab/tensor.h"
#include "kvlab/weights.h"

namespace kvkeep::lm {

/// K and V of one layer, owned by the caller: f32, f16 or bf16 [B, Hkv, capacity, D]; on the CPU also i8, with f32
/// scales [B, Hkv, capacity], and blocks of 32 numbers as llama.cpp stores them, q8_0 and q4_0 [B, Hkv, capacity,
/// D / 32]; make_cache() has these rotated as llama.cpp does (DenseKv::keys_rotated). The last dimension contiguous,
/// other strides free.
using LayerCache = DenseKv;

/// K and V bytes of one slot of a KV head in a cache of that dtype, with its scales.
[[nodiscard]] std::int64_t bytes_of_slot(const ModelSpec& spec, Dtype dtype);

/// Slots in use before a step: by sequence of the step and, if cuts made them differ, by layer and KV head.
struct SlotCounts {
  std::span<const std::int32_t> counts;
  std::int64_t sequence_stride = 1;
  std::int64_t layer_stride = 0;
  std::int64_t head_stride = 0;

  SlotCounts() = default;
  /// One count per sequence of the step, the same in every layer and head.
  SlotCounts(std::span<const std::int32_t> per_sequence)
      : counts(per_sequence) {}  // NOLINT(google-explicit-constructor)
  SlotCounts(const std::vector<std::int32_t>& per_sequence)
      : counts(per_sequence) {}  // NOLINT(google-explicit-constructor)
  /// Counts in the order of a CacheView's lengths: by sequence and, if they differ by row, by layer and head within.
  SlotCounts(const Lengths& lengths, std::int32_t kv_heads)
      : counts(lengths.data),
        sequence_stride(lengths.rows_per_sequence),
        layer_stride(lengths.per_row() ? kv_heads : 0),
        head_stride(lengths.per_row() ? 1 : 0) {}

  [[nodiscard]] std::int32_t at(std::int32_t layer, std::int32_t sequence, std::int32_t head) const {
    return counts[static_cast<std::size_t>(layer * layer_stride + sequence * sequence_stride + head * head_stride)];
  }
};

/// The new tokens of one step: any subset of the sequences, any number of tokens each.
struct Step {
  std::span<const std::int32_t> ids;  ///< [n_tokens]
  std::span<const std::int32_t>
      indptr;  ///< [n_sequences + 1]; tokens of sequence s are indptr[s]..indptr[s+1]-1, at least one
  std::span<const std::int32_t>
      positions;                       ///< [n_tokens] logical, ascending within a sequence, not below its slots in use
  std::span<const std::int32_t> rows;  ///< [n_sequences] index of each sequence in the cache's first dimension, with
                                       ///< pages in the block table's; all different
  SlotCounts lengths;                  ///< slots in use before the step; the new tokens go right after them
};

/// What a hook sees once per layer.
struct LayerSight {
  std::int32_t layer = 0;
  /// f32 [n_tokens, Hq, D] of the tokens present in this layer, on the weights' device; valid during the call only.
  /// on_layer: before RoPE (after bias and query norm); elsewhere after RoPE.
  Tensor queries;
  std::span<const std::int32_t> indptr =
      {};  ///< [n_sequences + 1] tokens present, by sequence of the step; a sequence that has left has none
  std::span<const std::int32_t> positions = {};  ///< [n_tokens] logical, of the tokens present
};

/// Logits of consecutive tokens of a step.
struct LogitsSight {
  std::int64_t first_token = 0;  ///< index in the step of the first row's token
  Tensor logits;                 ///< f32 [rows, vocab] on the weights' device; valid during the call only
};

/// Tokens of a step that continue to the layers after one.
struct Onward {
  std::vector<std::int32_t> tokens;  ///< indices among the tokens present in that layer, ascending
  std::vector<std::int32_t> indptr;  ///< [n_sequences + 1] of `tokens`; a sequence may continue with none: it leaves
                                     ///< the step, and its logits are NaN
};

enum class Logits : std::uint8_t { last, all, none };

struct StepOptions {
  Logits logits = Logits::last;
  /// Called in layer order: K and V of the tokens present are in the cache, but attention has not run yet.
  std::function<void(const LayerSight&)> on_layer = {};
  /// Called in layer order right before attention, with the queries after RoPE that `view` gets
  /// (parts::Folds::prefetch).
  std::function<void(const LayerSight&)> before_attention = {};
  /// Which slots attention may see: one tensor u8 [B, Hkv, capacity] per layer, 0 hides the slot; with pages, B rows of
  /// the block table with max_pages * page_size slots; on the weights' device. Empty: all slots in use. The step's own
  /// tokens are always visible (to themselves and to later ones). For checks of a cut cache against a masked one.
  std::span<const Tensor> visible = {};
  /// Called in layer order once attention has run over the keys and values of all tokens present. From here on the step
  /// no longer reads this layer's cache or its `step.lengths`, so the hook may cut both. Returns the tokens that
  /// continue; nothing: all do. Tokens that continue keep their positions. In later layers they take the slots right
  /// after step.lengths of that layer, in their order; those layers still need room for all tokens of the step. If no
  /// token is left, later layers do not run. The other tokens leave before this layer's output projection and MLP. Both
  /// work row by row, so tokens that continue get the same bits as with the published order, where the others leave
  /// after the MLP (Source: ASL), and this layer's MLP costs what later layers cost. The returned value is host data;
  /// on a device it costs one upload. Throws: InvalidArgument, naming layer and sequence, for tokens that do not ascend
  /// or are not the sequence's own, a sequence that continues without its last token (a sequence may leave with none),
  /// an indptr that does not fit, missing tokens that the window of a later sliding layer reaches from the last one
  /// (its slots must hold consecutive positions), and fewer tokens than before with Logits::all. Later layers are then
  /// unchanged.
  std::function<std::optional<Onward>(const LayerSight&)> on_attended = {};
  /// Called in layer order between attention and on_attended, with queries after RoPE: whatever tokens attend to
  /// besides the rows of the cache may be merged into the result of attention, in place (parts::Folds::view). The
  /// tensors are on the weights' device, and valid during the call only. Costs one logarithm per query head, and
  /// nothing if it is empty.
  std::function<void(const LayerSight&, const Attended&)> view = {};
  /// Called after the last layer with the logits of all tokens that reached it, in order and in blocks of at most 128
  /// rows: to score a prompt token by token without [n_tokens, vocab] at once. Costs the output matrix times all
  /// tokens.
  std::function<void(const LogitsSight&)> on_logits = {};
};

/// What computes a step.
enum class Path : std::uint8_t {
  kernels,    ///< the decoder's own, on the CPU: always the same bits
  operators,  ///< LibTorch's, on any device: the same numbers within rounding
};

/// Decodes with f32 activations; weights stay in the dtype they are stored in and are widened as they are read.
///
/// On the CPU every output number is one sum in an order fixed by the model's shape and the slots seen, so logits,
/// keys, values and queries of a sequence are the same bit for bit whatever else the step holds, however its prompt is
/// cut into steps, whether its cache is dense or in pages of any size, and for any number of threads. That also holds
/// if tokens leave on the way (StepOptions::on_attended), each sequence at its own layers. (On one machine: the order
/// depends on the vector width.) Elsewhere LibTorch's operators choose the order of sums: the same numbers within
/// rounding. There, matrices are widened to f32 for each product, and products are as exact as LibTorch's settings say
/// (full f32 unless the program allows TF32).
///
/// Sliding layers see the last `window` positions. Their slots hold consecutive positions up to the step: they are
/// never cut in the middle.
class Decoder {
 public:
  Decoder(io::ModelConfig config, Weights weights);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  /// Reads a model folder or a GGUF file; `dtype` is that of the matrices, by default the stored one, or f32 if they
  /// are quantised. Throws as LmConfig::read and Weights::read do. Cost: theirs; matrices of a folder are mapped.
  static Decoder open(const std::filesystem::path& path, std::optional<Dtype> dtype = {});

  [[nodiscard]] const io::ModelConfig& config() const { return config_; }
  [[nodiscard]] const ModelSpec& spec() const { return config_.spec; }
  [[nodiscard]] const Weights& weights() const { return weights_; }

  /// Moves the weights. Existing caches stay where they are. Off the CPU, steps run on operators.
  /// Throws: DeviceError if LibTorch has no such device, or no room there; the decoder is then unchanged.
  void to(Device device);

  /// Where the weights are. Caches must be there; ids, positions, lengths and block tables stay in host memory.
  [[nodiscard]] Device device() const { return device_of(weights_.embedding.device()); }

  /// Lets operators compute on the CPU, too, or the kernels again: to check one against the other. Throws:
  /// InvalidArgument for kernels off the CPU.
  void use(Path path);

  /// W_o of every layer, for policies that weigh values by it: [num_layers] [hidden, Hq * Dv], sharing the weights'
  /// memory.
  [[nodiscard]] std::vector<kvkeep::Tensor> output_projections() const;

  /// A zeroed cache for `sequences` sequences of up to `capacity` slots, on the weights' device; numbers are rounded to
  /// `dtype` as tokens are stored. On the CPU its memory comes as slots are written. Throws: InvalidArgument for a
  /// dtype or a head size that LayerCache does not name; Unsupported for i8 and blocks off the CPU; InvalidArgument,
  /// before anything is allocated, if all of it with the caches that live would not fit into what the machine had left
  /// before the first of them.
  [[nodiscard]] std::vector<LayerCache> make_cache(std::int64_t sequences, std::int64_t capacity,
                                                   Dtype dtype = Dtype::f32) const;

  /// A zeroed cache of `pages` pages of `page_size` slots, for a PagePool of the same sizes, on the weights' device.
  /// Memory and exceptions as above.
  [[nodiscard]] std::vector<LayerKv> make_pages(std::int64_t pages, std::int64_t page_size, Dtype dtype = Dtype::f32,
                                                PageLayout layout = PageLayout::head_slot) const;

  /// Runs the model on the step's tokens and appends their K and V after `step.lengths` in every layer.
  /// Returns f32 [n_sequences, vocab] (the last token of each), [n_tokens, vocab] for Logits::all, an empty tensor for
  /// Logits::none; on the weights' device. Rows of sequences that left the step on the way (Onward) are NaN. Throws:
  /// InvalidArgument before anything is written for an id outside the vocabulary, a sequence without tokens, positions
  /// that do not ascend, a row outside the cache or given twice, a cache that is full, has another shape or dtype or is
  /// on another device than the weights. Cost: one pass over the weights for every few tokens; attention memory is
  /// bounded by a few MB per thread. With operators: one pass over the weights, which moves 10 bytes for each f16 or
  /// bf16 number of 2 bytes, and memory for the activations of all tokens of the step; one copy to the device, none
  /// back.
  Tensor forward(const Step& step, std::span<const LayerCache> cache, const StepOptions& options = {});

  /// The same over pages, which `block_table` names for all layers: i32 [sequences, max_pages] in host memory, with the
  /// row of each sequence in `step.rows`. It must already hold the pages of the new tokens; entries after them are not
  /// read. Dense layers take no block table (an undefined tensor). Also throws: InvalidArgument for a table that is
  /// missing or too short, a page outside the cache, a page in which two tokens would write one slot (it is named
  /// twice), page sizes that are not one power of two up to 1024, dense and paged layers together. This call cannot see
  /// that a page is shared with a sequence outside the step: PagedSequences::append takes care of that.
  Tensor forward(const Step& step, std::span<const LayerKv> cache, const Tensor& block_table,
                 const StepOptions& options = {});

  /// Bytes of weights that one decode step reads: all matrices but the embedding (unless tied, where it is the output
  /// matrix).
  [[nodiscard]] std::int64_t bytes_per_step() const;

 private:
  struct Workspace;
  class Pass;
  io::ModelConfig config_;
  Weights weights_;
  std::unique_ptr<Workspace> workspace_;
  Path path_ = Path::kernels;
};

/// Index of the largest logit of each row, the lowest if several are equal. `logits` is f32 [n, vocab] on any device;
/// the host waits for a copy. Throws: InvalidArgument for a NaN, naming row and column.
std::vector<std::int32_t> argmax(const Tensor& logits);

}  // namespace kvkeep::lm
