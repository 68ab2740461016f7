// SPDX-License-Identifier: Apache-2.0
#pragma once
// llama.cpp with a kvkeep policy over its KV cache. Shows all that an application adds: the Evictor before the context
// is made, attach(), and Evictor::decode() for llama_decode().

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "extra_buffers.h"
#ifdef KVKEEP_LLAMA_CUDA
#include "kvkeep/cuda.h"
#endif
#include "kvkeep/llama.h"
#include "kvkeep/parts/pins.h"
#include "kvkeep/policy/registry.h"

inline volatile std::sig_atomic_t interrupted = 0;

template <auto free>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    free(object);
  }
};
using Model = std::unique_ptr<llama_model, Freed<llama_model_free>>;
using Context = std::unique_ptr<llama_context, Freed<llama_free>>;
using Sampler = std::unique_ptr<llama_sampler, Freed<llama_sampler_free>>;

struct Options {
  std::string model, policy = "full", prompt, prompt_file, cache_type = "f16";
  int gpu_layers = 0, context = 0, tokens = 256, threads = 0, prompt_tokens = 8000, batch = 512, rounds = 1,
      every = 1000, late = 1500, sight = 0;
  float temperature = 0;
  std::uint32_t seed = 1;
  bool stats = false, endless = false, hold_prompt = false;
  std::string positions = "text", text, samples, samples_out, budgets = "1/4,1/8", extra_buffers = "auto",
              device = "cpu";
  std::vector<std::string> policies;
};

[[noreturn]] inline void fail(const std::string& sentence) { throw std::runtime_error(sentence); }

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail("cannot read '" + path + "'");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline ggml_type cache_type(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0})
    if (name == ggml_type_name(type)) return type;
  fail("--cache-type: given '" + name + "'; allowed f32 f16 bf16 q8_0 q4_0");
}

inline Model load(const Options& o) {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = o.gpu_layers;
  params.use_extra_bufts = o.extra_buffers != "off";
  const std::string trouble = o.extra_buffers == "auto" ? trouble_with_extra_buffers() : "";
  if (!trouble.empty()) {
    std::cerr
        << "kvkeep-llama: products with weights in llama.cpp's extra buffer types end with '" << trouble
        << "' on this machine (AMX, on a virtual one?); weights stay in plain buffers, as under --extra-buffers off\n";
    params.use_extra_bufts = false;
  }
  Model model(llama_model_load_from_file(o.model.c_str(), params));
  if (!model) fail("llama.cpp cannot load '" + o.model + "'");
  return model;
}

/// Null: events run on the CPU.
inline std::shared_ptr<kvkeep::Machine> accelerator_of(const Options& o) {
  if (o.device == "cpu") return nullptr;
#ifdef KVKEEP_LLAMA_CUDA
  return kvkeep::cuda::accelerator(0);
#else
  fail(
      "--device cuda: this kvkeep-llama was built without kvkeep::cuda; allowed cpu, or a build with -DKVKEEP_CUDA=ON");
#endif
}

inline int cells_of(const Options& o, const llama_model* model) {
  return o.context > 0 ? o.context : llama_model_n_ctx_train(model);
}

/// A model, its context, and the policy over its cache. Two names are no policies: `alone` is llama.cpp without an
/// evictor, and `shift` is that with context shift. `no-flash:` before a name turns flash attention off for it.
class Engine {
 public:
  /// `offload`: the cache is on the GPU, of layers that are there.
  Engine(llama_model* model, const Options& o, std::string policy, int cells, bool offload = true)
      : vocab_(llama_model_get_vocab(model)) {
    llama_context_params params = llama_context_default_params();
    if (constexpr std::string_view kNoFlash = "no-flash:"; policy.starts_with(kNoFlash)) {
      policy.erase(0, kNoFlash.size());
      params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    shifts_ = policy == "shift";
    params.n_ctx = static_cast<std::uint32_t>(cells);
    params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(o.batch);
    params.n_seq_max = 1;
    params.swa_full = shifts_;  // layers that slide hold their window; llama.cpp shifts where they hold all cells
    if (o.threads > 0) params.n_threads = params.n_threads_batch = o.threads;
    params.type_k = params.type_v = cache_type(o.cache_type);
    params.offload_kqv = offload;
    if (shifts_) params.n_batch = params.n_ubatch = std::min(params.n_batch, std::max(1U, params.n_ctx / 4));
    if (!shifts_ && policy != "alone")
      evictor_ = std::make_unique<kvkeep::llama::Evictor>(
          model, params, kvkeep::make_policy(policy),
          o.positions == "cache" ? kvkeep::llama::Positions::cache : kvkeep::llama::Positions::text, accelerator_of(o));
    context_.reset(llama_init_from_model(model, params));
    if (!context_) fail("llama.cpp cannot make a context of " + std::to_string(cells) + " cells");
    if (evictor_) evictor_->attach(context_.get());
    sampler_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    if (o.endless) forbid_ends();
    if (o.temperature > 0) {
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_temp(o.temperature));
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_dist(o.seed));
    } else {
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_greedy());
    }
  }

  std::vector<llama_token> tokenize(const std::string& text, bool first) const {
    std::vector<llama_token> ids(text.size() + 8);
    const int count = llama_tokenize(vocab_, text.data(), static_cast<int>(text.size()), ids.data(),
                                     static_cast<int>(ids.size()), first, true);
    if (count < 0) fail("the tokenizer does not take this text");
    ids.resize(static_cast<std::size_t>(count));
    return ids;
  }

  std::string piece(llama_token id) const {
    std::string text(64, '\0');
    const int size = llama_token_to_piece(vocab_, id, text.data(), static_cast<int>(text.size()), 0, true);
    text.resize(static_cast<std::size_t>(std::max(0, size)));
    return text;
  }

  [[nodiscard]] bool ends(llama_token id) const { return llama_vocab_is_eog(vocab_, id); }
  llama_token sample() { return llama_sampler_sample(sampler_.get(), context_.get(), -1); }
  /// Null without a policy.
  [[nodiscard]] kvkeep::llama::Evictor* evictor() { return evictor_.get(); }
  /// Position of the next token, as llama.cpp counts.
  [[nodiscard]] int next_position() const { return llama_memory_seq_pos_max(llama_get_memory(context_.get()), 0) + 1; }
  [[nodiscard]] int cells_held() const {
    return evictor_ ? static_cast<int>(evictor_->cells(0).size()) : next_position();
  }
  [[nodiscard]] int highest_cell() const {
    return evictor_ ? std::ranges::max(evictor_->cells(0)) + 1 : next_position();
  }

  /// llama.cpp's own size of the sequence's state: rows of all layers in use, with their positions.
  [[nodiscard]] std::size_t state_bytes() const { return llama_state_seq_get_size(context_.get(), 0); }

  /// A prompt, or the next turn of a chat, in batches.
  void feed(std::vector<llama_token> ids) {
    const auto most = static_cast<std::size_t>(llama_n_batch(context_.get()));
    if (evictor_ && !evictor_->keeper().knows(0)) {
      say_pieces(ids.size(), most);
      evictor_->prompt(0, static_cast<std::int32_t>(ids.size()));
    }
    for (std::size_t at = 0; at < ids.size() && interrupted == 0; at += most)
      decode(ids.data() + at, std::min(most, ids.size() - at));
  }

  void decode(llama_token* ids, std::size_t count) {
    const llama_batch batch = llama_batch_get_one(ids, static_cast<std::int32_t>(count));
    if (shifts_) make_room(static_cast<int>(count));
    const int status = evictor_ ? evictor_->decode(batch) : llama_decode(context_.get(), batch);
    if (status == 1)
      fail("the cache of " + std::to_string(llama_n_ctx(context_.get())) +
           " cells is full; allowed a larger --context, or a --policy with a smaller budget");
    if (status != 0) fail("llama_decode ended with " + std::to_string(status));
  }

  /// With trigger=named, the event of a turn comes at its end.
  void end_turn() {
    if (evictor_ && evictor_->keeper().policy().trigger().kind == kvkeep::Trigger::Kind::named) evictor_->cut(0);
  }

  /// The text is `position` tokens long again.
  void take_back(int position) { llama_memory_seq_rm(llama_get_memory(context_.get()), 0, position, -1); }

  /// The oldest `tokens` tokens stay, whatever comes.
  void hold(int tokens) {
    kept_ = tokens;
    if (evictor_) evictor_->keeper().part<kvkeep::parts::Pins>().pin(0, 0, tokens);
  }

  /// -ln p of a token after what was decoded.
  [[nodiscard]] double surprisal(llama_token id, int output = -1) const {
    const float* logits = llama_get_logits_ith(context_.get(), output);
    const int size = llama_vocab_n_tokens(vocab_);
    const float largest = *std::max_element(logits, logits + size);
    double sum = 0;
    for (int i = 0; i < size; ++i) sum += std::exp(double{logits[i]} - largest);
    return std::log(sum) + largest - logits[id];
  }

  /// Mean -ln p of the last `last` tokens of a text that runs in batches, under the whole of it.
  double mean_surprisal(const std::vector<llama_token>& ids, std::size_t last) {
    double sum = 0;
    constexpr std::size_t kPart = 128;  // logits of so many tokens are in memory
    llama_batch batch = llama_batch_init(static_cast<int>(kPart), 0, 1);
    for (std::size_t at = 0; at < ids.size() && interrupted == 0; at += kPart) {
      batch.n_tokens = static_cast<int>(std::min(kPart, ids.size() - at));
      for (int t = 0; t < batch.n_tokens; ++t) {
        const std::size_t i = at + static_cast<std::size_t>(t);
        batch.token[t] = ids[i];
        batch.pos[t] = static_cast<llama_pos>(i);
        batch.n_seq_id[t] = 1;
        batch.seq_id[t][0] = 0;
        batch.logits[t] = i + 1 >= ids.size() - last && i + 1 < ids.size() ? 1 : 0;
      }
      if (llama_decode(context_.get(), batch) != 0) fail("llama_decode failed");
      for (int t = 0; t < batch.n_tokens; ++t)
        if (batch.logits[t] != 0) sum += surprisal(ids[at + static_cast<std::size_t>(t) + 1], t);
    }
    llama_batch_free(batch);
    return sum / static_cast<double>(last);
  }

  /// Streams an answer of at most `most` tokens; what it decoded. A character may be spread over tokens: what is shown
  /// ends with a whole one, and control characters are escaped but for line ends and tabs.
  std::string answer(int most, bool print) {
    std::string text;
    std::size_t shown = 0;
    const auto show = [&](std::size_t end) {
      if (print) std::cout << kvkeep::escaped(std::string_view(text).substr(shown, end - shown), "\n\t") << std::flush;
      shown = end;
    };
    for (int i = 0; i < most && interrupted == 0; ++i) {
      llama_token id = sample();
      if (ends(id)) break;
      text += piece(id);
      show(std::max(shown, whole(text)));
      if (i + 1 < most || print) decode(&id, 1);
    }
    show(text.size());
    return text;
  }

 private:
  /// Bytes of `text` without a character at its end of which bytes are still to come.
  static std::size_t whole(std::string_view text) {
    for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
      const auto byte = static_cast<unsigned char>(text[text.size() - back]);
      if (byte < 0x80) break;
      if (byte >= 0xC0) return back < (byte >= 0xF0 ? 4U : byte >= 0xE0 ? 3U : 2U) ? text.size() - back : text.size();
    }
    return text.size();
  }

  /// A prompt that is longer than the cache runs in pieces, or not at all.
  void say_pieces(std::size_t tokens, std::size_t batch) const {
    const std::size_t cells = llama_n_ctx(context_.get());
    if (tokens <= cells) return;
    const std::string said = "the prompt of " + std::to_string(tokens) + " tokens is longer than the cache of " +
                             std::to_string(cells) + " cells";
    if (evictor_->keeper().policy().trigger().prefill != kvkeep::Trigger::Prefill::pieces)
      fail(said + "; allowed a larger --context, or a --policy with prefill=pieces, which cuts it while it comes in");
    std::cerr << "kvkeep-llama: " << said << ": it runs in pieces of " << batch
              << " tokens, and is cut to the budget after each (prefill=pieces)\n";
  }

  /// llama.cpp's own way: the oldest half goes, but for those that are held, and the others move up.
  void make_room(int count) {
    const llama_memory_t memory = llama_get_memory(context_.get());
    const int held = next_position(), gone = (held - kept_) / 2;
    if (held + count <= static_cast<int>(llama_n_ctx(context_.get()))) return;
    llama_memory_seq_rm(memory, 0, kept_, kept_ + gone);
    llama_memory_seq_add(memory, 0, kept_ + gone, -1, -gone);
  }

  /// The text never ends.
  void forbid_ends() {
    std::vector<llama_logit_bias> never;
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab_); ++id)
      if (ends(id)) never.push_back({id, -INFINITY});
    llama_sampler_chain_add(sampler_.get(),
                            llama_sampler_init_logit_bias(llama_vocab_n_tokens(vocab_),
                                                          static_cast<std::int32_t>(never.size()), never.data()));
  }

  const llama_vocab* vocab_;
  bool shifts_;
  int kept_ = 4;                                     // by a context shift
  std::unique_ptr<kvkeep::llama::Evictor> evictor_;  // outlives the context
  Context context_;
  Sampler sampler_;
};
