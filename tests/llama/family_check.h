// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an evictor does to a model, against llama.cpp alone: which slots stay against attention as llama.cpp's own
// softmax gives it, where rows go byte by byte, and logits behind events against the same holes made by hand.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "family_models.h"
#include "kvkeep/llama.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::llama::family {

using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;

/// A check that failed says so.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline void require(bool ok, const std::string& what) {
  if (!ok) throw Wrong(what);
}

inline constexpr int kSinks = 2, kRecent = 4;

/// A model, and a text of which its windows see a part.
struct Trial {
  llama_model* model = nullptr;
  int window = 0, budget = 48, prompt = 100, interval = 16, steps = 60;
  double near = 0.03;  ///< slots of attention that differs by this share are a near-tie under flash attention
  std::vector<llama_token> tokens = {};

  explicit Trial(llama_model* m, int decoded = 60) : model(m), window(llama_model_n_swa(m)), steps(decoded) {
    budget = std::max(budget, window + 32);
    prompt = budget + 52;
    if (is_long()) interval = 4, steps = 12;
    const auto words = static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(model)));
    std::mt19937 random(7);
    for (int t = 0; t < prompt + steps; ++t) tokens.push_back(static_cast<llama_token>(random() % words));
  }
  /// Its window is a fixed one of thousands of tokens: less is tried.
  [[nodiscard]] bool is_long() const { return window > 1000; }
};

struct Way {
  llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_AUTO;
  ggml_type type = GGML_TYPE_F32;
};

[[nodiscard]] inline llama_context_params params_of(const Trial& trial, const Way& way) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(trial.tokens.size()) + 256;
  params.n_batch = params.n_ctx;
  params.n_ubatch = trial.is_long() ? 256 : 32;
  params.n_seq_max = 1;
  params.swa_full = false;
  params.n_threads = params.n_threads_batch = 1;
  params.flash_attn_type = way.flash;
  params.type_k = params.type_v = way.type;
  return params;
}

/// One sequence, alone or under an evictor.
class Run {
 public:
  Run(const Trial& trial, const Way& way, const std::string& policy = {},
      ggml_backend_sched_eval_callback watch = nullptr, void* data = nullptr)
      : trial_(trial), context_(nullptr, llama_free) {
    llama_context_params params = params_of(trial, way);
    params.cb_eval = watch;
    params.cb_eval_user_data = data;
    if (!policy.empty()) evictor = std::make_unique<Evictor>(trial.model, params, make_policy(policy));
    context_.reset(llama_init_from_model(trial.model, params));
    require(context_ != nullptr, "llama.cpp makes no context");
    if (evictor) evictor->attach(context_.get());
  }

  std::unique_ptr<Evictor> evictor;

  /// Decodes tokens [from, to) as one batch; the last one has logits. `between` comes before the event.
  void decode(int from, int to, const std::function<void()>& between = {}) {
    llama_batch batch = llama_batch_init(to - from, 0, 1);
    const std::unique_ptr<llama_batch, void (*)(llama_batch*)> freed(&batch,
                                                                     [](llama_batch* b) { llama_batch_free(*b); });
    for (int t = from; t < to; ++t) {
      const int i = batch.n_tokens++;
      batch.token[i] = trial_.tokens[static_cast<std::size_t>(t)];
      batch.pos[i] = t;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = static_cast<std::int8_t>(t + 1 == to);
    }
    if (evictor) evictor->begin(batch);
    const int status = llama_decode(context_.get(), batch);
    if (between) between();
    if (evictor) evictor->end(status);
    require(status == 0, "llama_decode() returned " + std::to_string(status));
  }
  [[nodiscard]] std::vector<float> logits() const {
    const float* from = llama_get_logits_ith(context_.get(), -1);
    require(from != nullptr, "there are no logits");
    return {from, from + llama_vocab_n_tokens(llama_model_get_vocab(trial_.model))};
  }
  [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context_.get()); }
  /// llama.cpp's own state of what is not cut: rows of the windows with their positions, and states of layers.
  [[nodiscard]] std::vector<std::byte> uncut_state() const {
    constexpr llama_state_seq_flags kPart = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
    std::vector<std::byte> state(llama_state_seq_get_size_ext(context_.get(), 0, kPart));
    llama_state_seq_get_data_ext(context_.get(), reinterpret_cast<std::uint8_t*>(state.data()), state.size(), 0, kPart);
    return state;
  }

 private:
  const Trial& trial_;
  Context context_;
};

/// Largest difference as a share of the largest logit.
[[nodiscard]] inline double apart(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    most = std::max(most, std::abs(double{a[i]} - b[i]));
    size = std::max(size, std::abs(double{b[i]}));
  }
  return size == 0 ? most : most / size;
}

// ---- What llama.cpp shows, read without the evictor's code ----

[[nodiscard]] inline int number_after(const char* name, const char* prefix) {
  const std::size_t length = std::strlen(prefix);
  return std::strncmp(name, prefix, length) == 0 ? std::atoi(name + length) : -1;
}

/// Tensors of the caches by layer, and what the softmax of a layer gave the newest token of a micro-batch.
struct Watch {
  std::map<int, const ggml_tensor*> keys = {}, values = {};
  std::map<int, std::vector<std::vector<float>>> weights = {};  ///< [layer][query head][cell]
  bool read = false;

  static bool on_node(ggml_tensor* t, bool ask, void* self) {
    auto& w = *static_cast<Watch*>(self);
    if (ask && t->op == GGML_OP_SET_ROWS) {
      const ggml_tensor* root = t;
      while (root->view_src != nullptr) root = root->view_src;
      if (const int l = number_after(root->name, "cache_k_l"); l >= 0) w.keys[l] = root;
      if (const int l = number_after(root->name, "cache_v_l"); l >= 0) w.values[l] = root;
    }
    const int l = t->op == GGML_OP_SOFT_MAX ? number_after(t->name, "kq_soft_max-") : -1;
    if (ask) return w.read && l >= 0;
    if (l < 0) return true;
    auto& heads = w.weights[l];
    heads.assign(static_cast<std::size_t>(t->ne[2]), {});
    for (std::int64_t h = 0; h < t->ne[2]; ++h) {
      heads[static_cast<std::size_t>(h)].resize(static_cast<std::size_t>(t->ne[0]));
      std::memcpy(heads[static_cast<std::size_t>(h)].data(),
                  static_cast<const char*>(t->data) + static_cast<std::size_t>(h) * t->nb[2] +
                      static_cast<std::size_t>(t->ne[1] - 1) * t->nb[1],
                  static_cast<std::size_t>(t->ne[0]) * sizeof(float));
    }
    return true;
  }
};

/// Mean attention of the newest prompt token, per full layer and KV head, by position.
using Scores = std::map<int, std::vector<std::vector<double>>>;

/// Full layers are those whose softmax reaches every token, and that store keys.
[[nodiscard]] inline Scores true_scores(const Trial& trial, int kv_heads) {
  Watch watch;
  Run run(trial, {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}, {}, &Watch::on_node, &watch);
  run.decode(0, trial.prompt - 1);
  watch.read = true;
  // The newest token alone, so that its micro-batch has one row; its keys and queries are the same.
  run.decode(trial.prompt - 1, trial.prompt);
  Scores scores;
  for (const auto& [layer, heads] : watch.weights) {
    const bool reaches = std::ranges::any_of(heads, [&](const std::vector<float>& head) {
      return std::any_of(head.begin(), head.begin() + trial.prompt - trial.window, [](float x) { return x > 0; });
    });
    if (!watch.keys.contains(layer) || !reaches) continue;
    const std::size_t group = heads.size() / static_cast<std::size_t>(kv_heads);
    auto& own = scores[layer];
    own.assign(static_cast<std::size_t>(kv_heads), std::vector<double>(static_cast<std::size_t>(trial.prompt)));
    for (std::size_t h = 0; h < heads.size(); ++h)
      for (std::size_t t = 0; t < own[h / group].size(); ++t)
        own[h / group][t] += double{heads[h][t]} / static_cast<double>(group);
  }
  return scores;
}

/// The budget's slots: sinks, the newest `recent`, and the best of the others; the newer of equal ones.
[[nodiscard]] inline std::vector<std::int32_t> best(const std::vector<double>& scores, int budget, int recent) {
  std::vector<int> order;
  const int count = static_cast<int>(scores.size());
  for (int t = kSinks; t < count - recent; ++t) order.push_back(t);
  std::ranges::sort(order, [&](int a, int b) {
    const double x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return x != y ? x > y : a > b;
  });
  order.resize(static_cast<std::size_t>(budget - kSinks - recent));
  for (int t = 0; t < kSinks; ++t) order.push_back(t);
  for (int t = count - recent; t < count; ++t) order.push_back(t);
  std::ranges::sort(order);
  return order;
}

/// The same slots, but for near-ties: what stays instead scores as much, up to `share`.
inline void require_best(std::span<const std::int32_t> kept, const std::vector<double>& scores, int budget, int recent,
                         double share, const std::string& where) {
  const std::vector<std::int32_t> wanted = best(scores, budget, recent);
  const int prompt = static_cast<int>(scores.size());
  require(kept.size() == wanted.size(), where + " keeps " + std::to_string(kept.size()) + " slots");
  double least = INFINITY;
  for (const std::int32_t t : wanted)
    if (t >= kSinks && t < prompt - recent) least = std::min(least, scores[static_cast<std::size_t>(t)]);
  for (const std::int32_t t : kept) {
    const bool guarded = t < kSinks || t >= prompt - recent;
    require(guarded || scores[static_cast<std::size_t>(t)] >= least * (1 - share),
            where + " keeps position " + std::to_string(t) + ", whose attention is " +
                std::to_string(scores[static_cast<std::size_t>(t)] / least) + " of the least that should stay");
  }
  for (const std::int32_t t : wanted)
    require((t >= kSinks && t < prompt - recent) || std::ranges::find(kept, t) != kept.end(),
            where + " drops protected position " + std::to_string(t));
}

// ---- Rows ----

/// Bytes of a row of a head, by layer, head and position, as the evictor says where they are.
using Rows = std::map<std::tuple<int, int, int>, std::vector<std::byte>>;

[[nodiscard]] inline Rows rows_of(const Evictor& e, const std::map<int, const ggml_tensor*>& caches) {
  Rows rows;
  const ModelSpec& spec = e.keeper().spec();
  const auto cells = e.cells(0);
  for (const std::int32_t l : spec.full_layers()) {
    const auto found = caches.find(l);
    if (found == caches.end()) continue;
    const ggml_tensor* t = found->second;
    const std::size_t bytes = t->nb[1] / static_cast<std::size_t>(spec.kv_heads);
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const auto positions = e.keeper().positions(0, l, h);
      for (std::size_t s = 0; s < positions.size(); ++s) {
        const auto* from = static_cast<const std::byte*>(t->data) + static_cast<std::size_t>(cells[s]) * t->nb[1] +
                           static_cast<std::size_t>(h) * bytes;
        rows[{l, h, positions[s]}].assign(from, from + bytes);
      }
    }
  }
  return rows;
}

/// Every byte of the layers that are not cut, and which of them llama.cpp still has.
[[nodiscard]] inline std::vector<std::byte> others(const Run& run, const Watch& watch) {
  const Evictor& e = *run.evictor;
  std::vector<std::byte> all;
  if (e.mixed()) all = run.uncut_state();
  for (const auto* caches : {&watch.keys, &watch.values})
    for (const auto& [l, t] : *caches) {
      if (e.keeper().spec().layers[static_cast<std::size_t>(l)].kind == LayerKind::full) continue;
      const auto* from = static_cast<const std::byte*>(t->data);
      all.insert(all.end(), from, from + ggml_nbytes(t));
    }
  return all;
}

// ---- Checks ----

/// Under `full` llama.cpp gives what it gives alone.
inline void check_full(const Trial& trial) {
  Run alone(trial, {}), kept(trial, {}, "full");
  const auto same = [&](int from, int to) {
    alone.decode(from, to);
    kept.decode(from, to);
    require(apart(kept.logits(), alone.logits()) == 0, "full: other logits behind token " + std::to_string(to));
  };
  same(0, 40);
  same(40, 75);
  same(75, trial.prompt);
  for (int t = trial.prompt; t < trial.prompt + trial.steps; ++t) same(t, t + 1);
}

/// By how much flash attention, which computes in 16 bits, differs from plain attention without any event: some of
/// these models are sharp.
[[nodiscard]] inline double noise_of(const Trial& trial) {
  Run flash(trial, {.flash = LLAMA_FLASH_ATTN_TYPE_ENABLED}), plain(trial, {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED});
  double most = 0;
  const auto step = [&](int from, int to) {
    flash.decode(from, to);
    plain.decode(from, to);
    most = std::max(most, apart(flash.logits(), plain.logits()));
  };
  step(0, trial.prompt);
  for (int t = trial.prompt; t < trial.prompt + trial.steps; ++t) step(t, t + 1);
  return most;
}

[[nodiscard]] inline std::string policy_of(const Trial& trial, const std::string& name, int recent,
                                           const std::string& more) {
  return name + ",budget=" + std::to_string(trial.budget) + ",interval=" + std::to_string(trial.interval) +
         ",prefill=cut,sink=" + std::to_string(kSinks) + ",recent=" + std::to_string(recent) + more;
}

/// One set for all: logits are those of holes made by hand at the same tokens.
inline void check_union(const Trial& trial, const Way& way, const std::string& policy, double share,
                        const Scores* scores, int protected_newest) {
  Run cut(trial, way, policy), alone(trial, way);
  std::set<int> held;
  int events = 0;
  const auto step = [&](int from, int to) {
    cut.decode(from, to);
    alone.decode(from, to);
    for (int t = from; t < to; ++t) held.insert(t);
    const double off = apart(cut.logits(), alone.logits());
    require(off <= share, policy + ": logits differ by " + std::to_string(off) + " at token " + std::to_string(to));
    if (cut.evictor->report().cuts.empty()) return;
    ++events;
    const ModelSpec& spec = cut.evictor->keeper().spec();
    const auto kept = cut.evictor->keeper().positions(0, spec.full_layers().front(), 0);
    const std::set<int> stays(kept.begin(), kept.end());
    for (const std::int32_t l : spec.full_layers())
      for (std::int32_t h = 0; h < spec.kv_heads; ++h)
        require(std::ranges::equal(cut.evictor->keeper().positions(0, l, h), kept), policy + ": rows differ");
    for (const int t : held)
      if (!stays.contains(t))
        require(llama_memory_seq_rm(alone.memory(), 0, t, t + 1), policy + ": llama.cpp refuses a hole");
    held = stays;
    if (events == 1 && scores != nullptr) {
      std::vector<double> most(static_cast<std::size_t>(trial.prompt));
      for (const auto& [layer, heads] : *scores)
        for (const auto& head : heads)
          for (std::size_t t = 0; t < most.size(); ++t) most[t] = std::max(most[t], head[t]);
      require_best(kept, most, trial.budget, protected_newest, 1e-4, policy);
    }
  };
  step(0, trial.prompt);
  require(events == 1, policy + ": no event at the end of the prompt");
  for (int t = trial.prompt; t < trial.prompt + trial.steps; ++t) step(t, t + 1);
  require(events >= 3, policy + ": " + std::to_string(events) + " events");
}

/// Each head its own: rows that stay are moved whole, nothing else is written, and decoding goes on.
inline void check_heads(const Trial& trial, const Way& way, const std::string& policy, const Scores* scores) {
  Watch watch;
  Run cut(trial, way, policy, &Watch::on_node, &watch);
  Evictor& e = *cut.evictor;
  int events = 0;
  Rows keys, values;
  std::vector<std::byte> rest;
  const auto step = [&](int from, int to) {
    cut.decode(from, to, [&] {
      keys = rows_of(e, watch.keys);
      values = rows_of(e, watch.values);
      rest = others(cut, watch);
    });
    for (const float x : cut.logits()) require(std::isfinite(x), policy + ": a logit is not a number");
    require(others(cut, watch) == rest, policy + ": an event wrote to a layer that it does not cut");
    for (const auto& [before, now] : {std::pair(&keys, rows_of(e, watch.keys)), {&values, rows_of(e, watch.values)}})
      for (const auto& [key, row] : now)
        require(before->contains(key) && before->at(key) == row,
                policy + ": a row of layer " + std::to_string(std::get<0>(key)) + " was lost");
    require(llama_memory_seq_pos_max(cut.memory(), 0) == to - 1, policy + ": the newest position is another one");
    if (e.report().cuts.empty()) return;
    if (++events > 1 || scores == nullptr) return;
    for (const auto& [layer, heads] : *scores)
      for (std::size_t h = 0; h < heads.size(); ++h)
        require_best(e.keeper().positions(0, layer, static_cast<std::int32_t>(h)), heads[h], trial.budget, kRecent,
                     trial.near, policy + ", layer " + std::to_string(layer) + ", head " + std::to_string(h));
  };
  step(0, trial.prompt);
  require(events == 1, policy + ": no event at the end of the prompt");
  for (int t = trial.prompt; t < trial.prompt + trial.steps; ++t) step(t, t + 1);
  require(events >= 3, policy + ": " + std::to_string(events) + " events");
}

/// What a model is, in words.
[[nodiscard]] inline std::string kind_of(const Facts& f) {
  int sliding = 0, other = 0;
  bool sinks = false;
  for (const LayerSpec& l : f.spec.layers) {
    sliding += l.kind == LayerKind::sliding ? 1 : 0;
    other += l.kind == LayerKind::other ? 1 : 0;
    sinks = sinks || !l.sinks.empty();
  }
  std::string kind = std::to_string(f.spec.full_layers().size()) + " full";
  if (sliding > 0) kind += ", " + std::to_string(sliding) + " sliding over " + std::to_string(f.window);
  if (other > 0) kind += ", " + std::to_string(other) + (f.states ? " with states" : " other");
  if (f.states && other == 0) kind += " with states";
  if (f.latent) kind += ", latent";
  if (f.indexed) kind += ", indexer";
  if (sinks) kind += ", sinks";
  if (f.spec.logit_cap > 0) kind += ", cap";
  if (f.planes) kind += ", M-RoPE";
  return kind;
}

struct Outcome {
  std::string kind, result;  ///< served, union (no row can be rewritten), refused, wrong, not built
  std::string why = {};
};

/// What an evictor does not take, it refuses when it is made.
[[nodiscard]] inline bool takes(const Trial& trial, const std::string& policy) {
  llama_context_params params = params_of(trial, {});
  try {
    const Evictor evictor(trial.model, params, make_policy(policy));
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// An indexer chooses a part of the tokens, so that its keys count.
inline void check_indexer(const std::string& arch) {
  constexpr std::uint32_t kChosen = 24;
  const Model model = make(arch, kChosen);
  const Trial trial(model.get());
  check_full(trial);
  check_union(trial, {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED},
              policy_of(trial, "tova", kRecent, ",heads=group,share=union"), 2e-3, nullptr, 0);
  check_union(trial, {}, policy_of(trial, "keydiff", kRecent, ",share=union"), 1e-2 + 2 * noise_of(trial), nullptr, 0);
}

[[nodiscard]] inline Outcome check(const Trial& trial, const std::function<void()>& where_indexed = {}) {
  Outcome outcome;
  try {
    const Facts facts = facts_of(trial.model, params_of(trial, {}));
    outcome.kind = kind_of(facts);
    const Scores scores = true_scores(trial, facts.spec.kv_heads);
    const std::vector<std::int32_t> full = facts.spec.full_layers();
    require(
        scores.size() == full.size() && std::ranges::all_of(full, [&](std::int32_t l) { return scores.contains(l); }),
        "other layers reach every token: " + std::to_string(scores.size()));
    if (!trial.is_long()) check_full(trial);
    const int newest = std::max(kRecent, facts.window);
    const Way off{.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}, on{};
    check_union(trial, off, policy_of(trial, "tova", kRecent, ",heads=group,share=union"), 2e-3, &scores, newest);
    if (!trial.is_long())
      check_union(trial, off, policy_of(trial, "snapkv", kRecent, ",scorer.window=8,share=union"), 2e-3, nullptr, 0);
    const double rounding = trial.is_long() ? 0 : 1e-2 + 2 * noise_of(trial);
    if (!trial.is_long())
      check_union(trial, on, policy_of(trial, "keydiff", newest, ",share=union"), rounding, nullptr, 0);
    outcome.result = "union";
    if (facts.indexed) {
      if (where_indexed) where_indexed();
      outcome.why = "an indexer chooses among the same cells in all layers";
      return outcome;
    }
    if (!facts.flash) {
      outcome.why = "no flash attention, so values are stored transposed";
      return outcome;
    }
    check_heads(trial, on, policy_of(trial, "tova", kRecent, ",heads=group"), &scores);
    if (!trial.is_long()) check_heads(trial, on, policy_of(trial, "ams-tova", kRecent, ""), nullptr);
    if (!trial.is_long()) check_heads(trial, on, policy_of(trial, "keydiff", kRecent, ""), nullptr);
    const std::string expected = policy_of(trial, "expected", kRecent, "");
    if (!trial.is_long() && takes(trial, expected)) check_heads(trial, on, expected, nullptr);
    // Rows of these move as blocks.
    if (facts.spec.key_dim % 32 == 0 && facts.spec.value_dim % 32 == 0 && !trial.is_long()) {
      check_heads(trial, {.type = GGML_TYPE_Q8_0}, policy_of(trial, "tova", kRecent, ",heads=group"), nullptr);
      check_heads(trial, {.type = GGML_TYPE_Q4_1}, policy_of(trial, "keydiff", kRecent, ""), nullptr);
    }
    outcome.result = "served";
  } catch (const Unsupported& refused) {
    outcome.result = "refused";
    outcome.why = refused.what();
  } catch (const std::exception& wrong) {
    outcome.result = "wrong";
    outcome.why = wrong.what();
  }
  return outcome;
}

[[nodiscard]] inline Outcome check(const std::string& arch) {
  // Of these llama.cpp's own tests make no model of metadata, or its graph does not take the shapes of ours.
  if (one_of(arch, {"chameleon", "dots3note", "graniteswitch", "plm"})) return {"", "not tried"};
  const Model model = make(arch);
  if (model == nullptr) return {"", "not built", "llama.cpp makes no model of our metadata"};
  return check(Trial(model.get()), [&] { check_indexer(arch); });
}

/// A model that was trained. Its text is longer than the cells in which llama.cpp keeps a window of 512 tokens.
[[nodiscard]] inline Outcome check_file(const std::string& file) {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  params.use_extra_bufts = false;  // of some virtual machines the processor names AMX, and does not run it
  const Model model(llama_model_load_from_file(file.c_str(), params), llama_model_free);
  if (model == nullptr) return {"", "not built", "llama.cpp cannot load it"};
  Trial trial(model.get(), 200);
  trial.near = 0.25;  // products with quantised weights round otherwise for a token alone than in a batch
  return check(trial);
}

}  // namespace kvkeep::llama::family
