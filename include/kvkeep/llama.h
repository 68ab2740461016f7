// SPDX-License-Identifier: Apache-2.0
#pragma once
/// kvkeep inside llama.cpp, unmodified: policies that drop, over the KV cache of a `llama_context`. Needs llama.cpp's
/// public headers and kvkeep::kvkeep or kvkeep::header_only, and links to whatever llama.cpp the program links to.
///
///     auto params = llama_context_default_params();
///     kvkeep::llama::Evictor evictor(model, params, kvkeep::make_policy("ams-tova,budget=1024"));
///     llama_context* ctx = llama_init_from_model(model, params);
///     evictor.attach(ctx);
///     // then, wherever the program calls llama_decode(ctx, batch):
///     evictor.decode(batch);
///
/// How it works: llama.cpp calls back for each node of its graph. From these nodes the evictor learns which cell holds
/// which token, and reads queries after RoPE. An event rewrites rows of the cache in place, and frees the cells of
/// dropped tokens with llama_memory_seq_rm(). docs/reference/llama.md has limits and costs.

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/keeper/keeper.h"
#include "kvkeep/keeper/thread_pool.h"
#include "kvkeep/llama/model.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep::llama {

inline constexpr const char* kMoved =
    ": its positions were moved, or removed in the middle (llama_memory_seq_rm, _add, _div), which cannot be followed; "
    "allowed removing the newest, or all of them (llama_memory_seq_rm(memory, id, -1, -1)) to decode it anew";

/// The fewest tokens of a sequence behind which layers that slide over `window` tokens lack none of them, where
/// llama.cpp holds theirs from position `oldest` on.
[[nodiscard]] inline llama_pos least_for_window(llama_pos oldest, std::int32_t window) {
  return oldest <= 0 ? 0 : oldest + window - 1;
}

/// Time that the evictor took, and how often it acted.
struct Spent {
  double observing = 0;      ///< seconds inside callbacks and between decodes, without events
  double events = 0;         ///< seconds
  std::int64_t decodes = 0;  ///< batches
  std::int64_t read = 0;     ///< micro-batches whose queries were read
  std::int64_t cut = 0;      ///< events
  std::int64_t drafted =
      0;  ///< times that a batch left a sequence whose prompt has ended between draft() and settle(),
          ///< where no event cuts it: it grows with every batch if settle() is never called
};

/// Which positions tokens have after an event.
enum class Positions : std::uint8_t {
  text,   ///< their own ones: distances are those of the text, and positions grow with it
  cache,  ///< 0, 1, 2, ... within the cache, as in StreamingLLM: keys are rotated to them, gaps close, and no position
          ///< grows beyond the cache, however long the text
};

/// Keeps the cache of one llama_context within a policy's budget. Not thread safe; must outlive the context, and stay
/// where it is in memory.
///
/// What a policy's `share` allows:
/// - `union`, `union_mean`: every layer and head keeps the same tokens. The others are dropped with
///   llama_memory_seq_rm(), whatever the backend and the type of the cache.
/// - `none`, `per_head`: each layer and head keeps tokens of its own, equally many. Rows are rewritten, so the cache
///   must be in host memory, or on the GPU of an accelerator, with flash attention; a quantised one needs host memory,
///   and heads of whole blocks.
///
/// With an accelerator the cache is on its GPU, and stays there: kernels score it and move its rows.
///
/// A sequence that llama.cpp has not seen begins at position 0. Its next token is at next_position(). Whoever removes
/// the newest positions of a sequence (speculative decoding), or all of them, is followed. Positions that were moved,
/// or removed in the middle (llama_memory_seq_rm(), _add(), _div(), context shift), are noticed before anything is
/// computed with them: the sequence is then refused with a StateError until all of it is removed.
///
/// A batch in which a sequence whose prompt has ended asks for several logits verifies drafts. Its event waits until
/// the refused ones are taken back: it comes with the next batch of the sequence, or in settle().
class Evictor {
 public:
  /// Puts the callback into `params`; one that is there already is called as well. Turns flash attention on if the
  /// policy needs it and `params` leaves it open. Events run on `params.n_threads` threads. Throws InvalidArgument,
  /// with every reason, if the policy cannot run on the model, and Unsupported for what facts_of() refuses, which runs
  /// one token in a context of its own, for a policy whose rows end up unequal, for `params` that rule out rewriting
  /// (flash attention off, a quantised cache with heads of no whole blocks or with Positions::cache) under a `share`
  /// that needs it, for policies that turn queries or keys back over a quantised cache or with Positions::cache, for
  /// Positions::cache over a quantised cache whose heads are no multiple of 64 (llama.cpp's rotation ends the program
  /// there) and over models whose layers slide or have states or an indexer, for models with an indexer unless
  /// share=union, for a budget of fewer slots than layers slide over, and, where queries or keys are turned, for RoPE
  /// that cannot be read.
  ///
  /// `accelerator`: cuda::accelerator(index) (kvkeep/cuda.h), if the cache is on that GPU, where ggml calls it
  /// "CUDA<index>". Keys of all full layers must be there (n_gpu_layers of all, offload_kqv), as f32, f16 or bf16; else
  /// throws Unsupported, as under Positions::cache for a `share` that rewrites rows, and InvalidArgument for a policy
  /// without kernels. Null: events run on the CPU, over host memory or copies. Its streams and llama.cpp's do not wait
  /// for each other, so the host waits: once at the end of an event, once more if cells must stay where they are, and
  /// in each layer of a batch whose queries are read.
  Evictor(const llama_model* model, llama_context_params& params, std::unique_ptr<KVPolicy> policy,
          Positions positions = Positions::text, std::shared_ptr<Machine> accelerator = nullptr)
      : facts_(facts_of(model, params)),
        pool_(std::max(1, params.n_threads)),
        accelerator_(std::move(accelerator)),
        keeper_(make_keeper(facts_, std::move(policy), positions, pool_.threads(), accelerator_)),
        needs_(keeper_.policy().needs()),
        full_layers_(keeper_.spec().full_layers()),
        positions_(positions),
        turns_(needs_.rope || positions == Positions::cache) {
    const Trigger trigger = keeper_.policy().trigger();
    const std::string name(keeper_.policy().name());
    KVKEEP_REQUIRE_AS(Unsupported, !trigger.ragged, "llama: under ", name,
                      " rows of a sequence end up unequal; allowed policies that keep equally many slots in each");
    KVKEEP_REQUIRE_AS(Unsupported, positions == Positions::text || !needs_.rope, "llama: ", name,
                      " turns queries or keys back by their positions in the text; allowed Positions::text");
    KVKEEP_REQUIRE_AS(Unsupported, !needs_.rope || dtype_of(params.type_k), "llama: the cache is ",
                      ggml_type_name(params.type_k),
                      ", whose keys llama.cpp may turn as a whole after RoPE (Hadamard), and ", name,
                      " turns them back by their positions; allowed f32, f16, bf16");
    const std::int32_t dim = keeper_.spec().key_dim;
    KVKEEP_REQUIRE_AS(
        Unsupported,
        positions == Positions::text || !ggml_get_type_traits(params.type_k)->is_quantized || dim % 64 == 0,
        "llama: llama.cpp cannot change positions in a cache of ", ggml_type_name(params.type_k), " with ", dim,
        " elements a head; allowed f32, f16, bf16, heads of a multiple of 64, or ", "Positions::text");
    KVKEEP_REQUIRE_AS(Unsupported, positions == Positions::text || !(facts_.mixed() || facts_.indexed), "llama: ",
                      facts_.states    ? "layers of this model have states"
                      : facts_.indexed ? "this model has an indexer"
                                       : "layers of this model slide",
                      ", whose positions do not follow those of the cache; allowed Positions::text");
    KVKEEP_REQUIRE_AS(
        Unsupported,
        trigger.never || trigger.budget.unit != Budget::Unit::slots || trigger.budget.slots >= facts_.window,
        "llama: layers of this model slide over ", facts_.window, " tokens, whose cells must stay, and the budget of ",
        name, " is ", trigger.budget.slots, " slots; allowed ", facts_.window, " or more");
    const Sharing share = keeper_.policy().sharing();
    one_set_ = trigger.never || share == Sharing::all || share == Sharing::all_mean;
    if (accelerator_ != nullptr) require_accelerable(params);
    KVKEEP_REQUIRE_AS(Unsupported, one_set_ || !facts_.indexed,
                      "llama: an indexer of this model chooses cells, for several layers at once, and under ", name,
                      " a cell has another token in each; allowed share=union");
    if (!one_set_) {
      for (const ggml_type type : {params.type_k, params.type_v})
        KVKEEP_REQUIRE_AS(
            Unsupported, dtype_of(type) || (positions == Positions::text && moves_as_blocks(type)),
            "llama: the cache is ", ggml_type_name(type), ", heads have ", keeper_.spec().key_dim, " and ",
            keeper_.spec().value_dim, " elements, and ", name,
            " rewrites rows of each layer and head; allowed f32, f16, bf16, with Positions::text heads of "
            "whole blocks, or share=union");
      KVKEEP_REQUIRE_AS(Unsupported, params.flash_attn_type != LLAMA_FLASH_ATTN_TYPE_DISABLED,
                        "llama: flash attention is off, so values are stored transposed, and ", name,
                        " rewrites rows of each layer and head; allowed with flash attention, or share=union");
      KVKEEP_REQUIRE_AS(Unsupported, facts_.flash,
                        "llama: llama.cpp has no flash attention for this model, so values "
                        "are stored transposed, and ",
                        name,
                        " rewrites rows of each layer and head; allowed "
                        "share=union");
      params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    }
    next_ = std::exchange(params.cb_eval, &Evictor::on_node);
    next_data_ = std::exchange(params.cb_eval_user_data, this);
    cache_.resize(keeper_.spec().layers.size());
  }
  Evictor(const Evictor&) = delete;
  Evictor& operator=(const Evictor&) = delete;

  /// Begins with an empty cache, of a context that was made with the constructor's `params`. One that was attached
  /// before is detached. Throws, and nothing has changed: InvalidArgument for no context; StateError if its cache is
  /// not empty; Unsupported for Positions::cache where llama.cpp cannot change positions.
  void attach(llama_context* context) {
    KVKEEP_REQUIRE(context != nullptr,
                   "llama: there is no context to attach; given null; allowed what llama_init_from_model() made");
    const auto sequences = static_cast<llama_seq_id>(llama_n_seq_max(context));
    for (llama_seq_id s = 0; s < sequences; ++s)
      KVKEEP_REQUIRE_AS(StateError, llama_memory_seq_pos_max(llama_get_memory(context), s) < 0, "llama: sequence ", s,
                        " has tokens already; allowed an empty cache");
    KVKEEP_REQUIRE_AS(Unsupported, positions_ == Positions::text || llama_memory_can_shift(llama_get_memory(context)),
                      "llama: positions of this model's cache cannot be changed; allowed Positions::text");
    detach();
    context_ = context;
    state_ = {};
    streams_ = llama_n_ctx_seq(context) == llama_n_ctx(context) ? 1 : sequences;
  }

  /// From now on llama.cpp is alone with its cache. Sequences that an event has cut go on with what they have. Between
  /// begin() and end(), no end() follows.
  void detach() {
    try {
      wait();
    } catch (const DeviceError&) {  // the GPU is gone, and the cache with it
    }
    for (const auto& [id, held] : held_) keeper_.leave(id);
    held_.clear();
    announced_.clear();
    moved_.clear();
    strayed_.clear();
    owners_.count.clear();
    labels_.clear();
    turning_.clear();
    context_ = nullptr;
    running_ = reading_ = unseen_ = broken_off_ = false;
    error_ = nullptr;
  }

  /// Tells how long the prompt of a sequence is, before its first tokens. Without it, a prompt ends with the first
  /// batch that asks for the logits of its last token (llama_batch::logits; null asks for those of the last token).
  void prompt(llama_seq_id sequence, std::int32_t tokens) {
    if (context_ != nullptr) sync();
    KVKEEP_REQUIRE(tokens > 0, "llama: the prompt of sequence ", sequence, " has ", tokens,
                   " tokens; allowed 1 or more");
    KVKEEP_REQUIRE_AS(StateError, !held_.contains(sequence), "llama: sequence ", sequence,
                      " has tokens already; allowed before its first ones");
    announced_[sequence] = tokens;
  }

  /// llama_memory_seq_cp() of the first `tokens` tokens. `to` begins with them, and shares their cells where the
  /// context has one buffer for all sequences (kv_unified), until an event drops them. Queries are not copied: the
  /// window of `to` begins with its own tokens. Throws, before anything is copied: StateError if `from` was cut, or if
  /// `to` is not empty; Unsupported if cells would be shared that a policy rewrites; InvalidArgument for more tokens
  /// than `from` has, or fewer where the context has a buffer per sequence, and a `to` that the context does not have.
  void copy(llama_seq_id from, llama_seq_id to, std::int32_t tokens) {
    sync();
    require_sequence(to);
    require_followed(from);
    require_followed(to);
    const Held& source = at(from);
    KVKEEP_REQUIRE_AS(StateError, source.unplaced.empty(), "llama: sequence ", from,
                      " was restored, and its cells are not known yet; allowed after its next batch");
    KVKEEP_REQUIRE_AS(StateError, !held_.contains(to) && from != to, "llama: sequence ", to,
                      " has tokens already; allowed an empty one");
    KVKEEP_REQUIRE(tokens > 0 && tokens <= keeper_.logical_length(from), "llama: ", tokens, " tokens of sequence ",
                   from, ", which has ", keeper_.logical_length(from), "; allowed 1 to all of them");
    KVKEEP_REQUIRE_AS(StateError, std::ssize(source.cells) == keeper_.logical_length(from), "llama: sequence ", from,
                      " was cut, so its copy could not be told from a whole prefix; allowed "
                      "before its first event");
    KVKEEP_REQUIRE(streams_ == 1 || tokens == keeper_.logical_length(from), "llama: ", tokens, " of ",
                   keeper_.logical_length(from), " tokens of sequence ", from,
                   ", which has a buffer of its own; allowed all of them, or kv_unified");
    KVKEEP_REQUIRE(!facts_.mixed() || tokens == keeper_.logical_length(from), "llama: ", tokens, " of ",
                   keeper_.logical_length(from), " tokens of sequence ", from, ", whose layers ",
                   facts_.states ? "have states" : "slide", "; allowed all of them");
    KVKEEP_REQUIRE_AS(
        Unsupported, streams_ > 1 || (one_set_ && positions_ == Positions::text && facts_.window == 0),
        "llama: sequences ", from, " and ", to,
        " would share cells that events rewrite; allowed with kv_unified = false, or share=union and Positions::text "
        "over a model without layers that slide");
    llama_memory_seq_cp(llama_get_memory(context_), from, to, 0, streams_ == 1 ? tokens : -1);
    keeper_.join(to, tokens, kOpenPrompt);
    Held copied{.copying = streams_ > 1};
    for (std::int32_t t = 0; t < tokens; ++t) {
      const std::int32_t cell = streams_ == 1 ? source.cells[static_cast<std::size_t>(t)]
                                              : source.cells[static_cast<std::size_t>(t)] % per_stream_ +
                                                    static_cast<std::int32_t>(to) * per_stream_;
      set_label(cell, t);
      owners_.add(cell);
      copied.cells.push_back(cell);
    }
    held_.emplace(to, std::move(copied));
  }

  /// The tokens of a sequence that follow are drafts, one or several a batch, or a turn in whose middle no event may
  /// come: none cuts it until settle() or cut(), which Spent::drafted shows. For contexts that draft token by token;
  /// batches that verify drafts need no call. Throws StateError for a sequence that has no tokens.
  void draft(llama_seq_id sequence) {
    sync();
    require_followed(sequence);
    static_cast<void>(at(sequence));
    held_.at(sequence).drafts = true;
  }

  /// The drafts of a sequence that were refused are taken back, and its tokens are final: an event that is due comes
  /// now; behind the next batch if llama.cpp copies rows with that, or shows the cells of a sequence that was restored.
  /// With Positions::cache it changes next_position(), so call it before the next batch is built; else the next
  /// batch of the sequence does the same. report() says what it did. Throws as begin() and end() do.
  void settle(llama_seq_id sequence) {
    require_between("settle", sequence);
    const bool waits = at(sequence).waits, now = may_cut(at(sequence));
    KVKEEP_REQUIRE_AS(StateError, !waits || holds(sequence, at(sequence).count()), "llama: sequence ", sequence,
                      kMoved);
    held_.at(sequence).drafts = false;
    held_.at(sequence).waits = waits && !now;
    report_ = {};
    if (waits && now) evict({sequence});
  }

  /// Takes back all but the first `tokens` tokens of a sequence with llama_memory_seq_rm(). False, and nothing has
  /// changed: those are fewer than least_length(), or layers have states, of which llama.cpp takes nothing back (unless
  /// the context has `n_rs_seq`). Who removes them himself is followed as far as queries of older tokens are
  /// remembered, 32 tokens. This goes further: the window then begins with the sequence's next tokens, behind which an
  /// event that waits comes; one that no event has cut begins as after copy(), without pins. Throws StateError for a
  /// sequence without tokens, or one that cannot be followed, InvalidArgument for more tokens than it has.
  /// `full`: as in least_length().
  bool go_back(llama_seq_id sequence, std::int64_t tokens, bool full = false);
  /// The fewest tokens that go_back() can leave: 0 while the cache holds all of the sequence, else as
  /// Keeper::least_length(). Where layers slide also the fewest behind which their window lacks nothing: llama.cpp
  /// holds their cells little further back than that of the newest token. `full`: without that, as layers that do not
  /// slide allow. Throws StateError for a sequence without tokens.
  [[nodiscard]] std::int64_t least_length(llama_seq_id sequence, bool full = false) const;

#if KVKEEP_FILES
  /// What must be kept beside the bytes of llama_state_seq_get_data() to go on with a sequence later, in this context
  /// or another, in this process or another: the keeper's state (Keeper::save), and which position of llama.cpp's each
  /// slot has. Throws StateError for a sequence without tokens or one that cannot be followed, between begin() and
  /// end(), while the cells of a copy() or keys to be turned wait for llama.cpp's next batch, and as Keeper::save().
  [[nodiscard]] std::vector<std::byte> save(llama_seq_id sequence);
  /// A sequence that llama_state_seq_set_data() has just put back goes on where it was saved, under any id; what was
  /// known of the id is forgotten. No bytes: a sequence that llama.cpp alone has saved, with all of its tokens from
  /// position 0 on; it begins as after copy(). Which cells the slots are in is learnt from the sequence's next batch:
  /// cells() is empty until then, and an event that waits comes behind that batch. Throws, and the sequence is not
  /// followed: InvalidArgument for bytes that are damaged, of other Positions, or as Keeper::restore(); StateError if
  /// llama.cpp holds other positions than were saved; Unsupported if the state of this llama.cpp does not list them in
  /// a way that is understood. Cost: asks llama.cpp for the sequence's state once.
  void restore(llama_seq_id sequence, std::span<const std::byte> bytes);
#endif

  /// llama_decode(), between begin() and end(). Returns what it returns: no event happens unless that is 0. Throws as
  /// both do. report() says what events did.
  std::int32_t decode(const llama_batch& batch) {
    begin(batch);
    const std::int32_t status = llama_decode(context_, batch);
    end(status);
    return status;
  }

  /// Before llama_decode() of this batch: cuts sequences of it whose events waited for drafts to be taken back. Throws,
  /// and nothing has changed: Unsupported for embeddings instead of tokens where positions have several dimensions
  /// (images under M-RoPE); StateError without a context, for a sequence that begins after position 0, goes back past
  /// its last event, was decoded past the evictor or whose positions were moved, and with Positions::cache for one
  /// whose event is due and for which settle() was not called; InvalidArgument for a sequence that the context does not
  /// have, and for positions that do not ascend by one; Unsupported for a token of several sequences. If an event
  /// throws, the sequences are no longer watched.
  void begin(const llama_batch& batch);
  /// After it: cuts the sequences of the batch that are due. `status`: what llama_decode() returned. If that is not 0,
  /// takes back what is not in the cache. Throws StateError if the graph showed that positions of a sequence of the
  /// batch were moved: the batch was not computed, and nothing of it is in the cache; other sequences go on. Throws
  /// Unsupported if the graph showed something else than facts_of() saw, or the cache is in memory that rows
  /// cannot be rewritten in; StateError if attention was not seen. The sequences are then no longer watched.
  void end(std::int32_t status);

  /// The event of a sequence comes now, by the program's word (the end of a turn), if it holds more than the budget;
  /// its drafts are settled. With Positions::cache it changes next_position(). report() says what it did. Throws as
  /// settle(), and StateError in the middle of a prompt, but with prefill=pieces; Unsupported under a policy that reads
  /// queries and whose trigger is not `named`, as those of tokens far from its own events were not read.
  void cut(llama_seq_id sequence);

  /// Layers slide or have states, beside those that are cut.
  [[nodiscard]] bool mixed() const { return facts_.mixed(); }
  /// Tokens over which layers slide, beside those that are cut; 0: none does.
  [[nodiscard]] std::int32_t window() const { return facts_.window; }
  /// Layers have states, beside those that are cut.
  [[nodiscard]] bool has_states() const { return facts_.states; }
  /// A context is attached: no error has ended that.
  [[nodiscard]] bool attached() const { return context_ != nullptr; }
  /// What the newest settle(), or begin() and end(), did.
  [[nodiscard]] const Report& report() const { return report_; }
  /// Sequences are llama.cpp's ids: keeper().positions(id, layer, head), pin(id, begin, end) and so on.
  [[nodiscard]] Keeper& keeper() { return keeper_; }
  [[nodiscard]] const Keeper& keeper() const { return keeper_; }
  [[nodiscard]] const Spent& spent() const { return spent_; }
  /// Where the next token of a sequence goes: keeper().logical_length(id) with Positions::text.
  [[nodiscard]] llama_pos next_position(llama_seq_id sequence) const {
    return static_cast<llama_pos>(keeper_.logical_length(sequence) - at(sequence).lag);
  }
  /// Cells of a sequence, in the order of its slots. Streams follow one another.
  [[nodiscard]] std::span<const std::int32_t> cells(llama_seq_id sequence) const { return at(sequence).cells; }
  /// Position under which llama.cpp knows a cell. After an event that rewrote rows, it says nothing about the text.
  [[nodiscard]] llama_pos label(std::int32_t cell) const { return labels_[static_cast<std::size_t>(cell)]; }

 private:
  struct Held {
    std::vector<std::int32_t> cells = {};
    bool prompted = false;  ///< its prompt has ended
    bool waits = false;     ///< its newest tokens may be taken back before it is cut
    bool drafts = false;    ///< until settle()
    std::int64_t lag = 0;   ///< by which positions are behind the text
    llama_pos least = 0;    ///< of its positions
    bool copying = false;   ///< llama.cpp copies its rows with the next batch
    bool blind = false;     ///< its window has no query until its next batch
    // Of a sequence that was restored, until its next batch: positions under which llama.cpp knows its cells.
    std::vector<llama_pos> unplaced = {};  ///< in the order of its slots
    std::vector<llama_pos> by_cell = {};   ///< the same, in the order of cells
    [[nodiscard]] std::size_t count() const { return cells.size() + unplaced.size(); }
  };

  /// Sequences that hold a cell. Events take none: rows are rewritten within the cells of their sequence.
  struct Owners final : PageAllocator {
    std::vector<std::int32_t> count;
    void add(std::int32_t cell) {
      if (static_cast<std::size_t>(cell) >= count.size()) count.resize(static_cast<std::size_t>(cell) + 1);
      ++count[static_cast<std::size_t>(cell)];
    }
    [[nodiscard]] std::int32_t references(std::int32_t cell) const override {
      return count[static_cast<std::size_t>(cell)];
    }
    [[nodiscard]] std::int32_t take() override { return -1; }
    void give_back(std::int32_t cell) override { --count[static_cast<std::size_t>(cell)]; }
  };

  /// A sequence of the batch.
  struct Member {
    llama_seq_id sequence = 0;
    llama_pos begins = 0;     ///< position of its first token in the batch
    std::int32_t tokens = 0;  ///< in the batch
    std::int32_t done = 0;    ///< of them, in micro-batches that have begun
    std::int32_t now = 0;     ///< of them, in the current micro-batch
    std::int32_t newest = 0;  ///< of them, the place of the last one in the current micro-batch
    std::int32_t from = 0;    ///< queries of its tokens from this one on are read
    std::int32_t outputs = 0;
    bool last_output = false;
  };

  /// Tokens that stay in an event because their cells must.
  struct PinnedWindow {
    SequenceId sequence = 0;
    std::int64_t begin = 0, end = 0;     ///< positions
    std::vector<PositionSpan> own = {};  ///< what the program has pinned
  };

  /// How the size of a sequence's saved state grows with its cells.
  struct StateSize {
    std::size_t cells = 0, bytes = 0;  ///< of the first that was asked for; 0: none was
    std::size_t per_cell = 0;          ///< 0: not known yet
  };

  /// One layer's tensors, and what events read instead of them where they cannot read them in place.
  struct LayerCache {
    ggml_tensor* keys = nullptr;
    ggml_tensor* values = nullptr;
    ggml_tensor* indexer = nullptr;  ///< its keys; null: the layer has none
    std::vector<std::byte> key_mirror = {}, value_mirror = {};
  };

  using Clock = std::chrono::steady_clock;
  struct Timer {
    double& seconds;
    Clock::time_point begun = Clock::now();
    explicit Timer(double& to) : seconds(to) {}
    ~Timer() { seconds += std::chrono::duration<double>(Clock::now() - begun).count(); }
  };

  /// Keys, values that are not within them, and those of indexers, of every layer that is cut.
  template <class F>
  void each_stored(const F& f) const {
    for (const std::int32_t l : full_layers_) {
      const LayerCache& own = cache_[static_cast<std::size_t>(l)];
      for (ggml_tensor* t : {own.keys, own.values, own.indexer})
        if (t != nullptr) f(t);
    }
  }
  /// Heads are whole blocks of a type, so that rows of a head move as they are.
  [[nodiscard]] bool moves_as_blocks(ggml_type type) const {
    const std::int64_t block = ggml_get_type_traits(type)->blck_size;
    return keeper_.spec().key_dim % block == 0 && keeper_.spec().value_dim % block == 0;
  }
  /// Events give slots the positions of their places, and turn keys to them.
  [[nodiscard]] bool places() const { return positions_ == Positions::cache && rewritable_ && numbers_; }
  /// Queries of the layer were read in this micro-batch.
  [[nodiscard]] bool layer_is_seen(std::int32_t layer) const {
    return static_cast<std::size_t>(layers_seen_) >= full_layers_.size() ||
           layer < full_layers_[static_cast<std::size_t>(layers_seen_)];
  }
  [[nodiscard]] bool is_full(std::int32_t layer) const {
    return layer >= 0 && layer < keeper_.spec().num_layers() &&
           keeper_.spec().layers[static_cast<std::size_t>(layer)].kind == LayerKind::full;
  }
  /// What events read and write in place: host memory, or that of the accelerator.
  [[nodiscard]] bool is_ours(const ggml_tensor* t) const {
    return accelerator_ == nullptr ? on_host(t) : place_of(t) == ggml_name(accelerator_->device());
  }
  [[nodiscard]] MachineMemory& memory() const {
    return accelerator_ == nullptr ? host_memory() : accelerator_->memory();
  }
  [[nodiscard]] static std::byte* row_at(const ggml_tensor* t, std::int32_t cell) {
    return static_cast<std::byte*>(t->data) + static_cast<std::size_t>(cell) * t->nb[1];
  }
  static std::optional<Dtype> dtype_of(ggml_type type) {
    if (type == GGML_TYPE_F32) return Dtype::f32;
    if (type == GGML_TYPE_F16) return Dtype::f16;
    if (type == GGML_TYPE_BF16) return Dtype::bf16;
    return {};
  }
  void set_label(std::int32_t cell, llama_pos position) {
    if (static_cast<std::size_t>(cell) >= labels_.size()) labels_.resize(static_cast<std::size_t>(cell) + 1, -1);
    labels_[static_cast<std::size_t>(cell)] = position;
  }
  [[nodiscard]] const Held& at(llama_seq_id sequence) const {
    const auto found = held_.find(sequence);
    KVKEEP_REQUIRE_AS(StateError, found != held_.end(), "llama: sequence ", sequence,
                      " has no tokens; allowed one that was decoded");
    return found->second;
  }

  static Keeper make_keeper(const Facts& facts, std::unique_ptr<KVPolicy> policy, Positions positions,
                            const Threads& threads, std::shared_ptr<Machine> accelerator) {
    const bool read = policy != nullptr && policy->needs().rope;
    if (read || positions == Positions::cache) {
      if (facts.rope_error) std::rethrow_exception(facts.rope_error);
      const std::int32_t open = facts.spec.first_without_rope();
      KVKEEP_REQUIRE_AS(Unsupported, open < 0, "llama: the graph stores keys of layer ", open,
                        " in another way than after RoPE alone, and ", read ? policy->name() : "Positions::cache",
                        " turns them; allowed policies that read them as they are, with Positions::text");
    }
    return Keeper(facts.spec, std::move(policy), {.accelerator = std::move(accelerator), .threads = threads});
  }

  [[nodiscard]] bool in_pieces() const { return keeper_.policy().trigger().prefill == Trigger::Prefill::pieces; }
  static bool on_node(ggml_tensor* node, bool ask, void* self) noexcept;
  bool wants(ggml_tensor* node);
  void meet(const ggml_tensor* stored);
  void see(const ggml_tensor* mask);
  void see_shift(const ggml_tensor* node, const ggml_tensor* keys);
  void check_attention(const Attention& seen, std::int32_t layer) const;
  void check_rope(const ggml_tensor* node, std::int32_t layer);
  void observe(const ggml_tensor* node);
  [[nodiscard]] Tensor gathered(const ggml_tensor* q, Dtype dtype);
  void observe_unread();
  void complete();
  void require_sequence(llama_seq_id sequence) const;
  void require_followed(llama_seq_id sequence) const;
  [[nodiscard]] std::size_t full_bytes(llama_seq_id sequence) const;
  [[nodiscard]] bool holds(llama_seq_id sequence, std::size_t cells) const;
  [[nodiscard]] std::vector<std::size_t> owners_of(std::size_t tokens);
  void learn_state_size(llama_seq_id sequence);
  void forget_moved();
  void break_off();
  void sync(bool failed = false);
  void forget(llama_seq_id sequence);
  void shorten(llama_seq_id sequence, std::int64_t tokens);
  void require_between(const char* operation, llama_seq_id sequence);
  static void take_newest(Held& held, Owners& owners, std::int64_t tokens);
  bool place_restored(Held& held);
  [[nodiscard]] bool may_cut(const Held& held) const;
  [[nodiscard]] std::vector<llama_pos> positions_by_cell(llama_seq_id sequence, std::vector<llama_pos> held) const;
  void require_accelerable(const llama_context_params& params) const;
  void wait();
  bool make_view(std::span<const SequenceId> due);
  void stay(Plan& plan) const;
  [[nodiscard]] LayerKv shown(std::int32_t layer, bool refresh);
  [[nodiscard]] Tensor mirrored(const ggml_tensor* from, std::vector<std::byte>& mirror, std::int32_t heads,
                                std::int32_t dim, bool read, bool refresh) const;
  [[nodiscard]] std::vector<PinnedWindow> pin_windows();
  void unpin(std::span<const PinnedWindow> windows);
  void evict(std::vector<SequenceId> due, bool named = false);
  void cut(const Plan& plan);
  [[nodiscard]] llama_pos oldest_fixed(std::span<const std::int32_t> cells) const;
  void require_window(const PageMove& move) const;
  void rearrange(llama_seq_id sequence, const PageMove& move, const Plan& plan);
  void lower(Held& held, const PageMove& move, std::vector<std::int32_t>& freed);
  void move_blocks(const PageMove& move, const Plan& plan);
  void place(Held& held, const PageMove& move, const Plan& plan, std::vector<std::int32_t>& freed);
  void require_plain_shift() const;
  void renumber(llama_seq_id sequence);
  void move_cell(std::int32_t from, std::int32_t to);
  void remove(llama_seq_id sequence, std::span<const std::int32_t> before, std::vector<std::int32_t> freed);

  Facts facts_;
  ThreadPool pool_;  ///< as many threads as the context decodes on; they sleep but for events
  std::shared_ptr<Machine> accelerator_;
  Keeper keeper_;
  Needs needs_;
  std::vector<std::int32_t> full_layers_;
  Positions positions_;
  bool turns_;               ///< queries or keys: RoPE of the graph must be that of the spec
  bool one_set_ = false;     ///< all rows of a sequence hold the same tokens
  bool value_rows_ = true;   ///< not transposed
  bool rewritable_ = false;  ///< rows are ours to move
  bool numbers_ = false;     ///< they are numbers, not blocks, and events read and write them where they are
  llama_context* context_ = nullptr;
  ggml_backend_sched_eval_callback next_ = nullptr;  ///< the program's own callback
  void* next_data_ = nullptr;
  bool next_asked_ = false;
  std::int32_t streams_ = 1, per_stream_ = 0;
  std::vector<LayerCache> cache_;   ///< [layers]
  std::vector<llama_pos> labels_;   ///< [cells]
  std::vector<llama_pos> turning_;  ///< [cells] by which llama.cpp will turn keys, on our behalf
  StateSize state_;
  std::set<llama_seq_id> moved_;                 ///< sequences of which the graph showed that positions were moved
  std::map<llama_seq_id, std::string> strayed_;  ///< those that the newest sync() could not follow, and why
  Owners owners_;
  std::map<llama_seq_id, Held> held_;
  std::map<llama_seq_id, std::int32_t> announced_;  ///< lengths of prompts
  // The batch, and the micro-batch that runs.
  bool running_ = false;
  std::vector<Member> members_;
  std::vector<std::int32_t> member_of_;  ///< [tokens of the batch] index in members_
  std::int32_t next_token_ = 0;          ///< of the batch, with one stream
  bool reading_ = false;                 ///< queries of the micro-batch are read
  std::int32_t layers_seen_ = 0;         ///< whose queries were
  std::int32_t asked_layer_ = -1;        ///< whose attention runs
  std::int32_t shifted_layer_ = -1;      ///< whose keys llama.cpp has turned last
  bool unseen_ = false;                  ///< the mask of the micro-batch was not yet seen
  bool broken_off_ = false;              ///< positions of a sequence of the batch were moved
  std::vector<SequenceId> ids_;
  std::vector<std::int32_t> indptr_, places_;         ///< places_: [tokens] row of the queries, grouped by sequence
  std::vector<std::int32_t> owner_;                   ///< [tokens] index in members_
  std::vector<std::int64_t> stored_;                  ///< [tokens] cells
  std::vector<std::byte> gathered_, fetched_, seen_;  ///< scratch
  std::vector<std::int32_t> visible_;                 ///< scratch: cells that a token sees, ascending
  DeviceMemory staged_;                               ///< the same on the accelerator
  std::int64_t staged_bytes_ = 0;
  const void* running_there_ = nullptr;  ///< on the accelerator, which may not have finished; null: it has
  std::exception_ptr error_;
  struct NodeRope {
    std::array<std::int32_t, 16> params = {};
    const ggml_tensor* factors = nullptr;
    RopeSpec rope = {};
  };
  std::vector<NodeRope> ropes_;  ///< that nodes of the graph had
  // The view.
  CacheView view_;
  std::vector<SequenceId> due_;
  std::vector<std::int32_t> lengths_, table_;
  Report report_;
  Spent spent_;
};

}  // namespace kvkeep::llama

#include "kvkeep/llama/bodies.h"
#include "kvkeep/llama/events.h"
#include "kvkeep/llama/session.h"
