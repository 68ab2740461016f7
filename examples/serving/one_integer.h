// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A small engine that knows one integer of what kvkeep does to a request: how many of its tokens are in the cache no
/// more. Blocks, block tables, prefix tree and scheduler are its own, as those of vLLM, SGLang and TensorRT-LLM are.
/// The places are numbered as in docs/reference/one-integer.md.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "block_tree.h"
#include "request.h"

namespace serving {

struct OneIntegerSettings {
  std::string policy = "full";  ///< one that cuts all rows of a sequence alike
  std::int32_t blocks = 64, block_size = 8;
  std::int32_t chunk = 16;        ///< tokens of a prompt in one step
  std::int32_t step_tokens = 64;  ///< of all requests in one step
  bool prefix_cache = true;
};

class OneIntegerEngine {
 public:
  /// A request, or one of its further samples.
  struct Served {
    Request request;
    std::int32_t sample = 0;
    std::vector<Token> text = {};  ///< prompt and answer; all but the newest token are computed once it decodes
    std::vector<Token> said = {};  ///< of an answer that is computed again
    std::int64_t computed = 0;     ///< tokens; the position of the next one
    std::int64_t evicted = 0;      ///< of these, in the cache no more: the one integer
    std::vector<std::int32_t> blocks = {};  ///< its row of the block table
    bool cut = false, forked = false;
    [[nodiscard]] std::int32_t cached() const { return static_cast<std::int32_t>(computed - evicted); }
    [[nodiscard]] std::int64_t prompt() const { return std::ssize(request.prompt); }
  };
  enum class Leave : std::uint8_t { swap, recompute };
  struct Numbers {
    std::int64_t tokens = 0, hits = 0, swapped = 0, recomputed = 0, accepted = 0, rejected = 0, forks = 0, cuts = 0;
    std::int64_t published_cut = 0;   ///< blocks that came into the tree after an event
    std::int64_t said_otherwise = 0;  ///< steps of an answer computed again that were not as before: none, unless the
                                      ///< policy cuts within prompts, where hits and chunks move the cuts
  };

  explicit OneIntegerEngine(const OneIntegerSettings& settings);

  /// Throws kvkeep::InvalidArgument for a request that does not fit the pool alone.
  void submit(Request request);
  /// At any point between steps; unknown ids are ignored.
  void cancel(SequenceId id);
  void preempt(SequenceId id, Leave how);
  /// False: nothing is left to do.
  bool step();
  /// Answers that have been finished since the last call.
  [[nodiscard]] std::map<SequenceId, std::vector<Token>> take_answers() { return std::exchange(answers_, {}); }

  [[nodiscard]] const std::map<SequenceId, Served>& running() const { return running_; }
  [[nodiscard]] std::int64_t waiting() const { return std::ssize(waiting_) + std::ssize(away_); }
  [[nodiscard]] const kvkeep::Keeper& keeper() const { return *keeper_; }
  [[nodiscard]] const Blocks& blocks() const { return blocks_; }
  [[nodiscard]] const BlockTree& tree() const { return tree_; }
  [[nodiscard]] const Numbers& numbers() const { return numbers_; }
  [[nodiscard]] const Model& model() const { return model_; }
  /// Keys or values of one slot of a block: [heads, dim].
  [[nodiscard]] float* slot(std::int32_t layer, bool values, std::int32_t block, std::int32_t slot) const;

 private:
  struct Away {
    Served served;
    std::vector<std::byte> state;
    std::vector<float> rows;
  };
  [[nodiscard]] std::int32_t blocks_for(std::int64_t slots) const;
  [[nodiscard]] float* place(const Served& s, std::int32_t layer, bool values, std::int32_t slot) const;
  void copy_block(std::int32_t from, std::int32_t to) const;
  void copy_rows(const Served& s, std::vector<float>& rows, bool back) const;
  bool admit();
  bool come_back();
  void release(Served& s);
  bool room_beside_others(std::int32_t blocks);
  bool make_room(std::int32_t blocks, SequenceId keep);
  bool grow(SequenceId id, std::int32_t tokens);
  [[nodiscard]] std::vector<Token> next_tokens(const Served& s, std::int32_t most) const;
  [[nodiscard]] std::vector<Model::State> run(SequenceId id, std::span<const Token> tokens);
  void accept(SequenceId id, std::span<const Token> tokens, std::span<const Model::State> states);
  void publish(SequenceId id);
  bool cut(SequenceId id);
  void fork(SequenceId id, const Model::State& last);
  bool finish(SequenceId id);

  Model model_;
  OneIntegerSettings settings_;
  Blocks blocks_;
  BlockTree tree_;
  std::vector<kvkeep::LayerKv> layers_;
  std::optional<kvkeep::Keeper> keeper_;
  std::map<SequenceId, Served> running_;
  std::deque<SequenceId> order_;  ///< of running_, as they came
  std::deque<Served> waiting_;
  std::deque<Away> away_;
  std::map<SequenceId, std::vector<Token>> answers_;
  Numbers numbers_;
};

}  // namespace serving
