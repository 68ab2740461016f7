// Which tokens stay under llama.cpp and under kvkeep's own decoder: the same weights, the same text, every policy
// twice. Both compute in their own order, so scores differ in the last digits, and near-ties fall on either side.

#include <llama.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/llama.h"
#include "kvkeep/lm/generation.h"
#include "kvkeep/lm/text_model.h"
#include "kvkeep/policy/registry.h"

namespace {

using Rows = std::vector<std::vector<std::int32_t>>;  // [layers * KV heads] positions

struct Options {
  std::string model, text;
  int prompt = 768, tokens = 256, threads = 1;
  std::vector<std::string> policies;
};

Rows ours(kvkeep::lm::Decoder& decoder, const std::vector<std::int32_t>& ids, const Options& o,
          const std::string& policy) {
  kvkeep::lm::Request request{.prompt = {ids.begin(), ids.begin() + o.prompt},
                              .new_tokens = o.tokens + 1,
                              .forced = {ids.begin() + o.prompt, ids.begin() + o.prompt + o.tokens},
                              .keep_positions = true};
  kvkeep::lm::Generator generator(decoder, kvkeep::make_policy(policy),
                                  {.capacity = o.prompt + o.tokens + 1, .cache_dtype = kvkeep::Dtype::f32});
  const kvkeep::SequenceId id = generator.join(std::move(request));
  while (generator.step()) {
  }
  return generator.leave(id).positions;
}

Rows theirs(llama_model* model, const std::vector<std::int32_t>& ids, const Options& o, const std::string& policy) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(o.prompt + o.tokens);
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(o.prompt);
  params.n_threads = params.n_threads_batch = o.threads;
  params.type_k = params.type_v = GGML_TYPE_F32;
  kvkeep::llama::Evictor evictor(model, params, kvkeep::make_policy(policy));
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model, params), llama_free);
  evictor.attach(context.get());
  std::vector<llama_token> fed(ids.begin(), ids.begin() + o.prompt + o.tokens);
  if (evictor.decode(llama_batch_get_one(fed.data(), o.prompt)) != 0) throw std::runtime_error("llama_decode failed");
  for (int i = 0; i < o.tokens; ++i)
    if (evictor.decode(llama_batch_get_one(fed.data() + o.prompt + i, 1)) != 0)
      throw std::runtime_error("llama_decode failed");
  Rows rows;
  const kvkeep::ModelSpec& spec = evictor.keeper().spec();
  for (std::int32_t l = 0; l < spec.num_layers(); ++l)
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const auto held = evictor.keeper().positions(0, l, h);
      rows.emplace_back(held.begin(), held.end());
    }
  return rows;
}

void compare(const Options& o) {
  std::ifstream in(o.text, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const kvkeep::lm::TextModel own = kvkeep::lm::TextModel::open(o.model);
  const std::vector<std::int32_t> ids =
      own.tokenizer.encode(text.substr(0, static_cast<std::size_t>(o.prompt + o.tokens) * 12));
  if (static_cast<int>(ids.size()) < o.prompt + o.tokens) throw std::runtime_error("the text is too short");
  kvkeep::lm::Decoder decoder = kvkeep::lm::Decoder::open(o.model, kvkeep::Dtype::f32);
  const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
      llama_model_load_from_file(o.model.c_str(), llama_model_default_params()), llama_model_free);
  if (!model) throw std::runtime_error("llama.cpp cannot load " + o.model);
  std::printf(
      "%d tokens of a prompt, %d more\n\n| policy | slots in all | others | rows that differ |\n|---|---:|---:|---:|\n",
      o.prompt, o.tokens);
  for (const std::string& policy : o.policies) {
    const Rows a = ours(decoder, ids, o, policy), b = theirs(model.get(), ids, o, policy);
    std::size_t slots = 0, same = 0, rows = 0;
    for (std::size_t r = 0; r < a.size(); ++r) {
      std::vector<std::int32_t> both;
      std::ranges::set_intersection(a[r], b[r], std::back_inserter(both));
      slots += a[r].size();
      same += both.size();
      rows += a[r] != b[r] ? 1 : 0;
    }
    std::printf("| %s | %zu | %zu | %zu of %zu |\n", policy.c_str(), slots, slots - same, rows, a.size());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Tokens that stay under llama.cpp and under kvkeep's decoder, on the same weights and text."};
  app.add_option("-m,--model", o.model,
                 "GGUF file, best in F32 (llama-quantize --allow-requantize in.gguf out.gguf F32)")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("-f,--text", o.text, "file with text")->required()->check(CLI::ExistingFile);
  app.add_option("--prompt", o.prompt, "tokens of the prompt")->capture_default_str();
  app.add_option("--tokens", o.tokens, "tokens fed one by one after it")->capture_default_str();
  app.add_option("-t,--threads", o.threads, "of llama.cpp; kvkeep's decoder reads OMP_NUM_THREADS")
      ->capture_default_str();
  app.add_option("--policy", o.policies, "one per row")->required();
  CLI11_PARSE(app, argc, argv);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    compare(o);
  } catch (const std::exception& error) {
    std::cerr << "kvkeep_llama_agreement: " << error.what() << '\n';
    return 2;
  }
}
