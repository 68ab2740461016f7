// SPDX-License-Identifier: Apache-2.0
#pragma once
/// The half of the engine that has the cache: it runs steps in the order in which they come, on one thread. Everything
/// that kvkeep asks of an engine is here; the places are numbered as in docs/reference/engines.md.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvkeep/keeper/copy_rows.h"
#include "kvkeep/kvkeep.h"
#include "prefix_cache.h"
#include "request.h"

namespace serving {

/// What a step is to do, in this order. Upper bounds: a prompt that is cached needs fewer steps than ordered.
struct Orders {
  struct Run {
    SequenceId id = 0;
    std::int32_t prompt_tokens = 0;  ///< the most of its prompt; once that is in the cache it decodes
  };
  std::vector<SequenceId> cancel = {}, swap_out = {}, swap_in = {};
  std::vector<Request> admit = {};
  std::vector<Run> run = {};
};

/// A sequence after a step, in numbers: what the scheduler knows of it.
struct Standing {
  SequenceId id = 0;
  kvkeep::LengthForecast ahead;  ///< (5) counts the steps that follow
  std::int32_t prompt_left = 0;
  std::int32_t tokens_left = 0;  ///< of its answer
  std::int32_t shared_pages = 0;
  std::int32_t step_tokens = 1;  ///< of a step that decodes: one, and drafts
};

struct Outcome {
  std::vector<Standing> standing = {};                                   ///< all sequences that are in the cache
  std::vector<std::pair<SequenceId, std::vector<Token>>> finished = {};  ///< and their answers
  std::int32_t available_pages = 0;                                      ///< free, or cached and held by nobody else
  std::int32_t cached_tokens = 0;                                        ///< of prompts that were not run
  std::int32_t tokens = 0;                                               ///< run in this step
  std::int32_t accepted_drafts = 0;
  kvkeep::Totals totals = {};
};

struct Settings {
  std::string policy = "full";
  std::int32_t pages = 64, page_size = 8;
  std::string cache = "radix";  ///< "hash", "radix" or "none"
  kvkeep::Threads threads = {};
  kvkeep::TraceHook trace = {};
};

class Worker {
 public:
  explicit Worker(const Settings& settings);
  ~Worker();

  /// Throws kvkeep::StateError if a step that was ordered lacks pages: the scheduler promised too much.
  Outcome step(const Orders& orders);

  /// Every sequence that is in the cache, for audits.
  struct Living {
    Request request;
    std::int32_t sample = 0;
    std::vector<Token> text = {};            ///< prompt and answer; all but the newest are in the cache once it decodes
    std::int32_t computed = 0;               ///< tokens in the cache
    std::vector<std::int32_t> lengths = {};  ///< [layers * heads] slots of its rows
    std::int64_t cut_at = 0;                 ///< its tokens at the last event; 0: none
  };
  [[nodiscard]] const std::map<SequenceId, Living>& living() const { return living_; }
  [[nodiscard]] const kvkeep::Keeper& keeper() const { return *keeper_; }
  [[nodiscard]] const kvkeep::PagedSequences& sequences() const { return sequences_; }
  [[nodiscard]] const kvkeep::PagePool& pool() const { return pool_; }
  /// Null: none.
  [[nodiscard]] const PrefixCache* cache() const { return cache_.get(); }
  /// Keys or values of one page: [page_size, heads, dim].
  [[nodiscard]] const float* page(std::int32_t layer, bool values, std::int32_t page) const;

  static constexpr std::int32_t kRows = Model::kLayers * Model::kHeads;

 private:
  /// Sequences of one step, and their tokens side by side.
  struct Batch {
    std::vector<SequenceId> ids = {};
    std::vector<std::int32_t> indptr{0};
    std::vector<Token> tokens = {};
    std::vector<Model::State> states = {};
  };
  struct Swapped {
    Living living;
    std::vector<std::byte> state, rows;
  };
  void leave(SequenceId id);
  void swap_out(SequenceId id);
  void swap_in(SequenceId id);
  void admit(const Request& request, Outcome& outcome);
  bool make_room(std::int32_t pages);
  void require_room(std::int32_t pages, SequenceId id);
  void add(const Orders::Run& run, Batch& batch);
  void forward(Batch& batch);
  void attend(std::int32_t layer, const Batch& batch, std::span<const float> queries, std::span<float> attended);
  void take_samples(const Batch& batch, Outcome& outcome);
  void publish(const Batch& batch);
  void cut(const Batch& batch);
  void begin_samples(const Batch& batch);
  void finish(Outcome& outcome);
  kvkeep::CacheView view_of(const std::vector<SequenceId>& ids);
  float* slot(std::int32_t layer, bool values, SequenceId id, std::int32_t head, std::int32_t slot);

  Model model_;
  Settings settings_;
  kvkeep::PagePool pool_;
  kvkeep::PagedSequences sequences_;
  std::vector<kvkeep::LayerKv> layers_;
  std::optional<kvkeep::Keeper> keeper_;
  std::unique_ptr<PrefixCache> cache_;  ///< after the pool, whose pages it holds
  std::map<SequenceId, Living> living_;
  std::map<SequenceId, Swapped> swapped_;
  std::vector<std::int32_t> flat_lengths_;
  kvkeep::Tensor block_table_;
};

}  // namespace serving
