// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Decoding under a policy: sequences join and leave, a step runs all live ones, and the Keeper decides after its last
/// layer.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvkeep/keep/paged_sequences.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/parts/pins.h"
#include "kvlab/decoder.h"
#include "kvlab/sampling.h"
#include "kvlab/tensor.h"

namespace kvkeep::lm {

/// One sequence to decode.
///
/// Step 0 runs the whole prompt at positions 0..n-1 and predicts token 0. Under a policy that narrows prompts it runs
/// layer by layer on the tokens that continue; if these start over (two passes), a further step runs them alone, as a
/// prompt of their own, and n is their number from then on. Step s >= 1 feeds token s-1 at position n+s-1, appends its
/// K and V in every layer, attends to the cache as it is, and predicts token s. The last token is not fed. The policy
/// is asked after every step, when all layers have run; step 0 is the end of the prompt.
struct Request {
  std::vector<std::int32_t> prompt;       ///< [n >= 1] token ids
  std::int32_t new_tokens = 1;            ///< tokens to predict, 1 or more
  std::vector<std::int32_t> forced = {};  ///< fed instead of the first predictions (teacher forcing, a question that
                                          ///< comes after the prompt was cut); then its own
  bool forced_at_once =
      false;  ///< step 1 feeds all of `forced`, like a question that follows a prompt: the policy is asked after it
  bool stop_at_end = false;  ///< stop at the first end token of the model that would be fed
  bool keep_logits = false;
  bool keep_positions = false;
  std::vector<PositionSpan> pinned = {};  ///< positions that stay through every event (parts::Pins::pin)
  Sampling sampling = {};                 ///< how every token is predicted; its step is that of the draw
};

/// What an event did to one sequence.
struct SequenceEvent {
  std::int32_t step =
      0;  ///< the event came after this step, by predictions: the prefill is step 0, a turn of go_on() one
  std::int32_t length_before = 0;  ///< slots of the first row
  std::int32_t length_after = 0;
  std::int64_t bytes_before =
      0;  ///< K and V bytes of the sequence's live slots in full layers, and of coarse entries of folded spans
  std::int64_t bytes_after = 0;
  std::int64_t slots_kept = 0;    ///< over all rows
  std::int64_t slots_chosen = 0;  ///< of these, by the scorer (Cut)
  std::vector<std::vector<std::int32_t>> positions =
      {};  ///< [full layers * Hkv] logical positions kept, ascending; empty unless asked for
};

/// The result of a Request.
struct Completion {
  std::vector<std::int32_t> tokens;  ///< [<= new_tokens] what every step predicted: the argmax, or the draw
  Tensor logits;  ///< f32 [tokens, vocab] in host memory, row s chose tokens[s]; undefined unless asked for
  std::vector<SequenceEvent> events;
  std::int64_t peak_bytes =
      0;  ///< most K and V bytes in full layers at any time, before an event cuts them, coarse entries included
  std::int64_t kept_bytes = 0;  ///< right after the last event; at the end if there was none
  std::int64_t end_bytes = 0;   ///< at the end, with the slots since the last event
  std::vector<std::vector<std::int32_t>> positions =
      {};  ///< [full layers * Hkv] logical positions held at the end, ascending; empty unless asked for
  std::optional<PromptReport> prompt = {};  ///< what happened to the prompt, under a policy that narrows
  std::optional<FoldedState> folded = {};   ///< at the end, under a policy that folds
  double first_token_seconds = 0;           ///< spent in the steps that ran the prompt, whatever else they ran
};

/// Slots that a sequence needs room for.
[[nodiscard]] std::int64_t slots_needed(const ModelSpec& spec, const Trigger& trigger, const Request& request);

/// Seconds spent, and tokens predicted in them. A step that prefills anything counts as prefill.
struct Pace {
  double prefill_seconds = 0;
  double decode_seconds = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t decoded_tokens = 0;  ///< by steps that only decode
};

/// The sequences that the next decision is about: everything that ran in this step.
struct DecisionSight {
  const Keeper& keeper;
  const CacheView& view;
  std::span<const std::int32_t> steps;  ///< [n] step of each sequence of the view
};

/// An event that is decided but not yet applied: rows, scores and selection are complete, the cache is unchanged.
struct EventSight {
  const Keeper& keeper;
  const CacheView& view;
  const Plan& plan;  ///< its rows' `sequence` is an index into `view.sequences`
};

/// The result of attention in one layer of a step, folded spans included.
struct AttentionSight {
  std::span<const SequenceId> sequences;  ///< [n_sequences] in the order of `layer.indptr`
  const LayerSight& layer;                ///< queries after RoPE
  const Attended& attended;               ///< the step continues with what is written here
};

/// Called while a step runs. All optional.
struct GenerationHooks {
  std::function<void(const LayerSight&)> on_layer = {};
  std::function<void(const AttentionSight&)> on_attention =
      {};  ///< in every layer, once folded spans are merged; costs one logarithm per query head
  std::function<void(const DecisionSight&)> before_decision = {};
  std::function<void(const EventSight&)> on_event = {};  ///< if something is cut
  /// [vocab] logits that predict the next token, just before on_token; valid during the call.
  std::function<void(SequenceId sequence, std::span<const float> logits)> on_logits = {};
  std::function<void(SequenceId sequence, std::int32_t token)> on_token =
      {};                                                    ///< predicted, in the order of the sequences of a step
  std::function<void(std::int64_t predicted)> on_step = {};  ///< after a step: tokens it predicted
};

struct GeneratorOptions {
  std::int64_t places = 1;    ///< sequences alive at once
  std::int64_t capacity = 0;  ///< slots of each place; see slots_needed()
  Dtype cache_dtype = Dtype::f32;
  std::vector<LayerKv> cache =
      {};  ///< dense, as Decoder::make_cache() makes it for `places` and `capacity`; empty: one of its own
  std::int32_t page_size = 0;  ///< slots per page, a power of two up to 1024: the cache is a PagePool with pages for
                               ///< `capacity` slots per place; 0: dense
  GenerationHooks hooks = {};
  std::shared_ptr<Machine> accelerator =
      nullptr;  ///< of the decoder's device, for this generator alone; null: the decoder is on the CPU
};

/// A prompt after its last layer, from which the sequences that begin with it continue.
struct PromptRun {
  std::vector<SequenceId> sequences;  ///< [generators] that joined
  std::vector<LayerKv> cache;         ///< [num_layers] of one sequence of n slots, as the generators' caches are
  Tensor logits;                      ///< f32 [1, vocab] in host memory, of the last token
  std::vector<float> surprisal = {};  ///< [n] if a policy reads it
  double seconds = 0;
};

/// Sequences over one cache and one policy. The result of a sequence does not depend on the others, bit for bit.
class Generator {
 public:
  /// `decoder` must outlive the generator. Throws as Keeper, PagePool and Decoder::make_cache do; InvalidArgument for
  /// an accelerator of another device than the decoder's, or none off the CPU; Unsupported for pages if the policy cuts
  /// a model that also has sliding layers: their slots are in the same pages.
  Generator(Decoder& decoder, std::unique_ptr<KVPolicy> policy, GeneratorOptions options);

  [[nodiscard]] bool has_place() const { return !free_places_.empty(); }

  /// A sequence joins; its prompt runs in the next step. Throws: StateError if every place is taken; InvalidArgument
  /// for an empty prompt, an id outside the vocabulary, sampling out of range, or more slots than a place has.
  SequenceId join(Request request);

  /// Runs one prompt for several generators: each of their policies sees its queries, as if its generator had run it. A
  /// sequence joins each of them and waits for begin() with the result; generators may share one cache
  /// (GeneratorOptions::cache) that only one uses at a time. Throws: as join(), before any sequence joins;
  /// InvalidArgument for generators of different decoders or cache dtypes; Unsupported for a policy that narrows
  /// prompts (it runs later layers on fewer tokens), and pages. Cost: one prefill, and one copy of its keys and values.
  static PromptRun run_prompt(std::span<Generator* const> generators, const Request& request);

  /// Continues a sequence of run_prompt() from its prompt, which is copied into the cache: the first token is predicted
  /// and the policy is asked, as in step 0. Throws: StateError for a sequence that is not waiting. Cost: one copy of
  /// the prompt's keys and values, and its event.
  void begin(SequenceId sequence, const PromptRun& prompt);

  /// A sequence continues a conversation: `tokens` run in one step at its next positions, and `new_tokens` more are
  /// predicted behind them, fewer if its place is full. Allowed once it has predicted a token, done or not; that last
  /// prediction was not fed, and is dropped unless `tokens` begin with it. Throws, before anything has changed: as
  /// done() and join(); StateError if its prompt has not run, or its place has no slots for the tokens.
  void go_on(SequenceId sequence, std::vector<std::int32_t> tokens, std::int32_t new_tokens);

  /// Slots that a sequence's longest row has left in its place: tokens that it can be fed before an event.
  [[nodiscard]] std::int64_t slots_left(SequenceId sequence) const;

  /// K and V bytes of a sequence's live slots in full layers, and of coarse entries of folded spans.
  [[nodiscard]] std::int64_t bytes_held(SequenceId sequence) const;

  /// Runs one step of every sequence that is not done. False if there is none.
  bool step();

  [[nodiscard]] bool done(SequenceId sequence) const;

  /// Removes a sequence, done or not, and returns what it has so far. Its place is free again.
  Completion leave(SequenceId sequence);

  [[nodiscard]] const Keeper& keeper() const { return keeper_; }
  [[nodiscard]] const Pace& pace() const { return pace_; }

 private:
  struct Sequence {
    Request request;
    std::int32_t place = 0;
    std::vector<std::int32_t> lengths = {};  ///< [layers * Hkv] slots in use
    std::vector<Tensor> logits = {};
    Completion result = {};
    bool done = false;
    bool waits = false;                   ///< for begin()
    std::vector<std::int32_t> turn = {};  ///< fed by its next step, if go_on() said so
    float next_surprisal = 0;             ///< of the token that is fed next
    Tensor last = {};                     ///< [vocab] logits of the newest prediction, if the policy reads surprisal
    [[nodiscard]] std::int32_t feeds() const;  ///< tokens of its next step, once its prompt has run
    std::vector<std::int32_t> prompt =
        {};  ///< its prompt as it runs: the request's, or the tokens that a first pass chose from it
  };
  struct Batch;
  void check(const Request& request) const;
  void check_ids(const std::vector<std::int32_t>& ids, const char* which) const;
  [[nodiscard]] Batch gather() const;
  Tensor run(Batch& batch);
  void add(Batch& batch, SequenceId id) const;
  [[nodiscard]] std::optional<Onward> narrow(Batch& batch, const LayerSight& sight);
  void restart_prompt(SequenceId id);
  void predict(const Batch& batch, const Tensor& logits);
  std::int32_t write(SequenceId id, const Tensor& row);
  void pass(Batch& batch, std::size_t i, const LogitsSight& sight, std::int64_t first, std::int64_t last);
  void tell_surprisal(const Batch& batch);
  void decide(Batch& batch);
  void record(SequenceId id, const Cut& cut, std::int64_t bytes_before);
  [[nodiscard]] std::int64_t live_bytes(std::span<const std::int32_t> lengths) const;
  [[nodiscard]] std::vector<std::vector<std::int32_t>> positions(SequenceId id) const;
  [[nodiscard]] const PromptReport* prompt_report(SequenceId id) const;
  [[nodiscard]] std::int64_t prompt_bytes(SequenceId id) const;
  [[nodiscard]] CacheView view_of(Batch& batch);

  /// Who holds which page, if the cache is in pages.
  struct Pages {
    Pages(std::int32_t pages, std::int32_t page_size) : pool(pages, page_size), sequences(pool) {}
    PagePool pool;
    PagedSequences sequences;
  };

  Decoder& decoder_;
  GeneratorOptions options_;
  Keeper keeper_;
  std::vector<LayerKv> cache_;
  std::unique_ptr<Pages> pages_;
  std::vector<std::int32_t> free_places_;
  std::map<SequenceId, Sequence> sequences_;
  SequenceId next_ = 0;
  Pace pace_;
};

/// Decodes every request, `options.places` at a time; a new one joins as soon as one is done. Completions are in the
/// order of the requests, whose sequences are named 0, 1, 2 and so on. `options.capacity` 0: as much as the largest
/// request needs.
struct GenerationRun {
  std::vector<Completion> completions;
  Totals totals;
  Pace pace;
};
GenerationRun generate(Decoder& decoder, std::unique_ptr<KVPolicy> policy, std::vector<Request> requests,
                       GeneratorOptions options = {});

}  // namespace kvkeep::lm
