#pragma once
/// The reference decoder: Llama, Qwen2 and Qwen3 on a CPU or a GPU, over a cache, dense or in pages, that the caller
/// owns and may cut between steps.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/lm/config.h"
#include "kvkeep/lm/weights.h"
#include "kvkeep/observe/attended.h"

namespace kvkeep::lm {

/// K and V of one layer, owned by the caller: f32, f16 or bf16 [B, Hkv, capacity, D]. The last dimension contiguous,
/// other strides free.
using LayerCache = DenseKv;

/// Slots in use before a step: by sequence of the step, and where cuts made them differ, by layer and by KV head.
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
  /// Counts in the order of a CacheView's lengths: by sequence, and where they differ by row, by layer and head within.
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
  std::span<const std::int32_t> rows;  ///< [n_sequences] where each sequence lives in the cache's first dimension, in
                                       ///< pages in the block table's; no two alike
  SlotCounts lengths;                  ///< slots in use before the step; the new tokens go right behind them
};

/// What a hook sees once per layer.
struct LayerSight {
  std::int32_t layer = 0;
  /// f32 [n_tokens, Hq, D] of the tokens present in this layer, where the weights are; valid during the call only.
  /// on_layer: before RoPE (after bias and query norm); on_attended: after RoPE.
  Tensor queries;
  std::span<const std::int32_t> indptr =
      {};  ///< [n_sequences + 1] tokens present, by sequence of the step; a sequence that has left has none
  std::span<const std::int32_t> positions = {};  ///< [n_tokens] logical, of the tokens present
};

/// Logits of tokens that follow each other in a step.
struct LogitsSight {
  std::int64_t first_token = 0;  ///< of the block, in the step
  Tensor logits;                 ///< f32 [rows, vocab] where the weights are; valid during the call only
};

/// Tokens of a step that go on to the layers behind one.
struct Onward {
  std::vector<std::int32_t> tokens;  ///< places among the tokens present in that layer, ascending
  std::vector<std::int32_t> indptr;  ///< [n_sequences + 1] of them; a sequence may go on with none: it leaves the step,
                                     ///< and its logits are NaN
};

enum class Logits : std::uint8_t { last, all, none };

struct StepOptions {
  Logits logits = Logits::last;
  /// Called in layer order: K and V of the tokens present are in the cache, attention has not run yet.
  std::function<void(const LayerSight&)> on_layer = {};
  /// Which slots attention may see: one tensor u8 [B, Hkv, capacity] per layer, 0 hides the slot; in pages, B rows of
  /// the block table with max_pages * page_size slots; where the weights are. Empty: all slots in use. The step's own
  /// tokens are always visible (to themselves and to later ones). For checks of a cut cache against a masked one.
  std::span<const Tensor> visible = {};
  /// Called in layer order once attention has run over the keys and values of all tokens present. From here on the step
  /// reads neither this layer's cache nor its `step.lengths` any more: the hook may cut both. Says who goes on;
  /// nothing: all do. Tokens that go on keep their positions. In the layers behind they stand at the slots right behind
  /// step.lengths of that layer, in their order; room for all tokens of the step is needed there all the same. When
  /// nobody is left the layers behind do not run. The others leave before this layer's output projection and MLP. Both
  /// work row by row, so who goes on gets the same bits as with the published order, where they leave behind the MLP
  /// (Source: ASL), and this layer's MLP costs what the layers behind cost. The answer is host data; on a device it
  /// costs one upload. Throws: InvalidArgument, naming layer and sequence, for tokens that do not ascend or are not the
  /// sequence's own, a sequence that goes on without its last token (a sequence may leave with none), an indptr that
  /// does not fit, tokens missing that the window of a sliding layer behind reaches from the last one (its slots must
  /// hold consecutive positions), and fewer tokens than before with Logits::all. Layers behind are as before then.
  std::function<std::optional<Onward>(const LayerSight&)> on_attended = {};
  /// Called in layer order between attention and on_attended, queries after RoPE: what tokens attend to beside the rows
  /// of the cache may be merged into what attention gave, in place (Keeper::view). The tensors are where the weights
  /// are, and valid during the call only. Costs a logarithm a query head, and nothing where it is empty.
  std::function<void(const LayerSight&, const Attended&)> view = {};
  /// Called behind the last layer with the logits of all tokens that reached it, in order and in blocks of at most 128
  /// rows: what a prompt is worth token by token, without [n_tokens, vocab] at once. Costs the output matrix times all
  /// tokens.
  std::function<void(const LogitsSight&)> on_logits = {};
};

/// By what a step is computed.
enum class Path : std::uint8_t {
  kernels,    ///< the decoder's own, on the CPU: the same bits always
  operators,  ///< LibTorch's, on any device: the same numbers within rounding
};

/// Decodes with f32 activations; weights stay in the dtype they are stored in and are widened as they are read.
///
/// On the CPU every output number is one sum in an order fixed by the model's shape and the slots seen, so logits,
/// keys, values and queries of a sequence are the same bit for bit whatever else the step holds, however its prompt is
/// cut into steps, whether its cache is dense or in pages of any size, and for any number of threads. That holds too
/// where tokens stay behind (StepOptions::on_attended), each sequence at layers of its own. (On one machine: the order
/// depends on the vector width.) Elsewhere LibTorch's operators choose the order of sums: the same numbers within
/// rounding. Matrices are widened to f32 for each product there. Products are as exact as LibTorch's switches say (full
/// f32 unless the program allows TF32).
///
/// Sliding layers see the last `window` positions. Their slots hold consecutive positions up to the step: they are
/// never cut inside.
class Decoder {
 public:
  Decoder(LmConfig config, Weights weights);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  /// Reads a model folder or a GGUF file; `dtype` is that of the matrices, by default the stored one, f32 where they
  /// are quantised. Throws as LmConfig::read and Weights::read do. Cost: theirs; matrices of a folder are mapped.
  static Decoder open(const std::filesystem::path& path, std::optional<ScalarType> dtype = {});

  [[nodiscard]] const LmConfig& config() const { return config_; }
  [[nodiscard]] const ModelSpec& spec() const { return config_.spec; }
  [[nodiscard]] const Weights& weights() const { return weights_; }

  /// Moves the weights. Caches that were made before stay where they are. Off the CPU, steps run by operators.
  /// Throws: DeviceError where LibTorch has no such device, or no room there; the decoder is as it was then.
  void to(Device device);

  /// Where the weights are. Caches must lie there; ids, positions, lengths and block tables stay in host memory.
  [[nodiscard]] Device device() const { return weights_.embedding.device(); }

  /// Lets the operators compute on the CPU too, or the kernels again: for checks of one by the other. Throws:
  /// InvalidArgument for kernels off the CPU.
  void use(Path path);

  /// W_o of every layer as the policies want it that weigh values by it: [num_layers] [hidden, Hq * Dv], sharing the
  /// weights' memory.
  [[nodiscard]] std::vector<Tensor> output_projections() const;

  /// A zeroed cache for `sequences` sequences of up to `capacity` slots, where the weights are.
  [[nodiscard]] std::vector<LayerCache> make_cache(std::int64_t sequences, std::int64_t capacity,
                                                   ScalarType dtype = kFloat32) const;

  /// A zeroed cache of `pages` pages of `page_size` slots, for a PagePool of the same, where the weights are.
  [[nodiscard]] std::vector<LayerKv> make_pages(std::int64_t pages, std::int64_t page_size, ScalarType dtype = kFloat32,
                                                PageLayout layout = PageLayout::head_slot) const;

  /// Runs the model on the step's tokens and appends their K and V behind `step.lengths` in every layer.
  /// Returns f32 [n_sequences, vocab] (the last token of each), [n_tokens, vocab] for Logits::all, an empty tensor for
  /// Logits::none; where the weights are. Rows of sequences that left the step on the way (Onward) are NaN. Throws:
  /// InvalidArgument before anything is written for an id outside the vocabulary, a sequence without tokens, positions
  /// that do not ascend, a row outside the cache or given twice, a cache that is full, has another shape or dtype or
  /// lies on another device than the weights. Cost: one pass over the weights for every few tokens; attention memory is
  /// bounded by a few MB per thread. By operators: one pass over the weights, which moves 10 bytes for each f16 or bf16
  /// number where 2 are stored, and memory for the activations of all tokens of the step; one copy to the device, none
  /// back.
  Tensor forward(const Step& step, std::span<const LayerCache> cache, const StepOptions& options = {});

  /// The same over pages, in every layer those that `block_table` names: i32 [sequences, max_pages] in host memory, of
  /// which `step.rows` says the row. It must hold the pages of the new tokens already; what is behind them is not read.
  /// Dense layers take no block table (an undefined tensor). Throws, besides: InvalidArgument for a table that is
  /// missing or too short, a page outside the cache, a page that two tokens would write at one slot (it stands in two
  /// places), page sizes that are not one power of two up to 1024, dense and paged layers together. That a page is
  /// shared with a sequence outside the step cannot be seen here: PagedSequences::append takes care of it.
  Tensor forward(const Step& step, std::span<const LayerKv> cache, const Tensor& block_table,
                 const StepOptions& options = {});

  /// Bytes of weights that one decode step reads: all matrices but the embedding (unless tied, where it is the output
  /// matrix).
  [[nodiscard]] std::int64_t bytes_per_step() const;

 private:
  struct Workspace;
  class Pass;
  LmConfig config_;
  Weights weights_;
  std::unique_ptr<Workspace> workspace_;
  Path path_ = Path::kernels;
};

/// Index of the largest logit of each row, the lowest where several are equal. `logits` is f32 [n, vocab] on any
/// device; the host waits for a copy. Throws: InvalidArgument for a NaN, naming row and column.
std::vector<std::int32_t> argmax(const Tensor& logits);

}  // namespace kvkeep::lm
