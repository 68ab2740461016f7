// SPDX-License-Identifier: Apache-2.0
// Which tokens stay under llama.cpp and under kvkeep's own decoder: the same weights, the same text, every policy
// twice. Both compute in their own order, so scores differ in the last digits, and near-ties fall on either side: how
// near is in the table, for all rows that held the same slots in both before an event.

#include <llama.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "kvkeep/llama.h"
#include "kvkeep/policy/registry.h"
#include "kvlab/generation.h"
#include "kvlab/text_model.h"

namespace {

using Rows = std::vector<std::vector<std::int32_t>>;  // [layers * KV heads] positions

struct Options {
  std::string model, text;
  int prompt = 768, tokens = 256, threads = 1;
  bool first = false;
  std::vector<std::string> policies;
};

/// What a policy decided about one row.
struct Decided {
  std::vector<std::int32_t> positions;  // of its slots
  std::vector<bool> stays;              // [slots]
  std::vector<float> scores;            // [slots]; empty: ranked by position
  std::vector<float> mass = {};         // [slots], and how slots were divided; empty: one ranking
  std::vector<std::int32_t> ends = {}, quotas = {};
};
using Event = std::vector<Decided>;  // [rows]

/// A policy that tells what it decides.
class Watched final : public kvkeep::KVPolicy {
 public:
  Watched(std::unique_ptr<kvkeep::KVPolicy> policy, std::vector<Event>& events)
      : policy_(std::move(policy)), events_(events) {}
  [[nodiscard]] std::string_view name() const override { return policy_->name(); }
  [[nodiscard]] kvkeep::Needs needs() const override { return policy_->needs(); }
  [[nodiscard]] std::vector<std::string> problems(const kvkeep::ModelSpec& spec) const override {
    return policy_->problems(spec);
  }
  [[nodiscard]] std::vector<std::string> problems_on(const kvkeep::Machine& machine,
                                                     const kvkeep::ModelSpec& spec) const override {
    return policy_->problems_on(machine, spec);
  }
  [[nodiscard]] kvkeep::Trigger trigger() const override { return policy_->trigger(); }
  [[nodiscard]] kvkeep::Sharing sharing() const override { return policy_->sharing(); }
  [[nodiscard]] const kvkeep::MemoryOptions* memory() const override { return policy_->memory(); }
  [[nodiscard]] std::string to_json() const override { return policy_->to_json(); }
  [[nodiscard]] kvkeep::Decision decide(kvkeep::Machine& machine, const kvkeep::Evidence& evidence) const override {
    kvkeep::Decision decision = policy_->decide(machine, evidence);
    if (!decision.keep) return decision;
    Event event;
    for (std::size_t r = 0; r < evidence.table.rows.size(); ++r) {
      const kvkeep::Row& row = evidence.table.rows[r];
      const auto of_row = [&](const kvkeep::Tensor& all) -> std::vector<float> {
        if (!all.defined()) return {};
        const float* first = all.data<float>() + row.first;
        return {first, first + row.length};
      };
      Decided one{.positions = {row.positions, row.positions + row.length},
                  .stays = std::vector<bool>(static_cast<std::size_t>(row.length)),
                  .scores = of_row(decision.scores.data)};
      for (const std::int32_t slot : decision.keep->row(r)) one.stays[static_cast<std::size_t>(slot)] = true;
      if (decision.allotment) {
        one.mass = of_row(decision.allotment->mass.data);
        one.ends = decision.allotment->ends[r];
        one.quotas = decision.allotment->quotas[r];
      }
      event.push_back(std::move(one));
    }
    events_.push_back(std::move(event));
    return decision;
  }

 private:
  std::unique_ptr<kvkeep::KVPolicy> policy_;
  std::vector<Event>& events_;
};

/// How far two decisions about the same slots are from each other. Scores are in standard deviations of their row.
struct Apart {
  std::size_t rows = 0, slots = 0, disputed = 0, other_quotas = 0;
  double noise = 0;  // largest difference of a slot's scores
  double gap = 0;    // largest lead, in our scores, of a disputed slot over the one that took its place
  double mass = 0;   // largest difference of a segment's mass, as a share of the row's, where quotas differ

  void add(const Decided& a, const Decided& b) {
    ++rows;
    slots += a.stays.size();
    double mean = 0, square = 0;
    for (const float score : a.scores)
      if (std::isfinite(score)) mean += score / static_cast<double>(a.scores.size());
    for (const float score : a.scores)
      if (std::isfinite(score)) square += (score - mean) * (score - mean) / static_cast<double>(a.scores.size());
    const double unit = std::sqrt(square) > 0 ? std::sqrt(square) : 1;
    for (std::size_t t = 0; t < a.scores.size(); ++t)
      if (std::isfinite(a.scores[t]) && std::isfinite(b.scores[t]))
        noise = std::max(noise, std::abs(double{a.scores[t]} - b.scores[t]) / unit);
    const bool alike = a.ends == b.ends && a.quotas == b.quotas;
    if (!alike) {
      ++other_quotas;
      std::int32_t begin = 0;
      for (const std::int32_t end : a.ends) {
        double difference = 0;
        for (std::int32_t t = begin; t < end; ++t)
          difference += double{a.mass[static_cast<std::size_t>(t)]} - b.mass[static_cast<std::size_t>(t)];
        mass = std::max(mass, std::abs(difference));
        begin = end;
      }
    }
    // Within a segment that kept as many slots in both, those of one only are a near-tie of scores.
    std::vector<std::int32_t> ends = a.ends;
    if (ends.empty()) ends.push_back(static_cast<std::int32_t>(a.stays.size()));
    std::size_t begin = 0;
    for (const std::int32_t end : ends) {
      double most = -INFINITY, least = INFINITY;
      for (; begin < static_cast<std::size_t>(end); ++begin) {
        if (a.stays[begin] == b.stays[begin]) continue;
        ++disputed;
        const double score = a.scores.empty() ? 0 : a.scores[begin];
        if (a.stays[begin]) most = std::max(most, score);
        if (b.stays[begin]) least = std::min(least, score);
      }
      if (alike && most > least) gap = std::max(gap, (most - least) / unit);
    }
  }
};

Rows ours(kvkeep::lm::Decoder& decoder, const std::vector<std::int32_t>& ids, const Options& o,
          std::unique_ptr<kvkeep::KVPolicy> policy) {
  kvkeep::lm::Request request{.prompt = {ids.begin(), ids.begin() + o.prompt},
                              .new_tokens = o.tokens + 1,
                              .forced = {ids.begin() + o.prompt, ids.begin() + o.prompt + o.tokens},
                              .keep_positions = true};
  kvkeep::lm::Generator generator(decoder, std::move(policy),
                                  {.capacity = o.prompt + o.tokens + 1, .cache_dtype = kvkeep::Dtype::f32});
  const kvkeep::SequenceId id = generator.join(std::move(request));
  while (generator.step()) {
  }
  return generator.leave(id).positions;
}

Rows theirs(llama_model* model, const std::vector<std::int32_t>& ids, const Options& o,
            std::unique_ptr<kvkeep::KVPolicy> policy) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(o.prompt + o.tokens);
  params.n_batch = params.n_ubatch = static_cast<std::uint32_t>(o.prompt);
  params.n_threads = params.n_threads_batch = o.threads;
  params.type_k = params.type_v = GGML_TYPE_F32;
  kvkeep::llama::Evictor evictor(model, params, std::move(policy));
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
      "%d tokens of a prompt, %d more\n\n| policy | slots in all | others | rows that differ | decisions on rows alike "
      "| disputed slots | other quotas | largest gap | scores apart | mass apart |\n"
      "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
      o.prompt, o.tokens);
  for (const std::string& policy : o.policies) {
    std::vector<Event> in_a, in_b;
    const Rows a = ours(decoder, ids, o, std::make_unique<Watched>(kvkeep::make_policy(policy), in_a)),
               b = theirs(model.get(), ids, o, std::make_unique<Watched>(kvkeep::make_policy(policy), in_b));
    std::size_t slots = 0, same = 0, rows = 0;
    for (std::size_t r = 0; r < a.size(); ++r) {
      std::vector<std::int32_t> both;
      std::ranges::set_intersection(a[r], b[r], std::back_inserter(both));
      slots += a[r].size();
      same += both.size();
      rows += a[r] != b[r] ? 1 : 0;
    }
    Apart apart;
    if (in_a.size() != in_b.size()) throw std::runtime_error(policy + ": the engines had other events");
    for (std::size_t e = 0; e < (o.first ? std::min<std::size_t>(1, in_a.size()) : in_a.size()); ++e)
      for (std::size_t r = 0; r < in_a[e].size(); ++r)
        if (in_a[e][r].positions == in_b[e][r].positions) apart.add(in_a[e][r], in_b[e][r]);
    std::printf("| %s | %zu | %zu | %zu of %zu | %zu of %zu | %zu of %zu | %zu | %.2e | %.2e | %.2e |\n",
                policy.c_str(), slots, slots - same, rows, a.size(), apart.rows, in_a.size() * a.size(),
                apart.disputed / 2, apart.slots, apart.other_quotas, apart.gap, apart.noise, apart.mass);
    std::fflush(stdout);
  }
}

/// The same weights in F32: what both engines compute with then differs in the order of sums alone.
void dequantise(const std::string& from, const std::string& to) {
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_ALL_F32;
  params.allow_requantize = true;
  if (llama_model_quantize(from.c_str(), to.c_str(), &params) != 0)
    throw std::runtime_error("llama.cpp cannot write " + from + " in F32 to " + to);
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Tokens that stay under llama.cpp and under kvkeep's decoder, on the same weights and text."};
  std::string f32;
  app.add_option("-m,--model", o.model, "GGUF file")->required()->check(CLI::ExistingFile);
  app.add_option("--f32", f32, "write the model's weights to this file in F32, unless it exists, and use it");
  app.add_option("-f,--text", o.text, "file with text")->required()->check(CLI::ExistingFile);
  app.add_option("--prompt", o.prompt, "tokens of the prompt")->capture_default_str();
  app.add_option("--tokens", o.tokens, "tokens fed one by one after it")->capture_default_str();
  app.add_option("-t,--threads", o.threads, "of llama.cpp; kvkeep's decoder reads OMP_NUM_THREADS")
      ->capture_default_str();
  app.add_flag("--first", o.first,
               "compare the decisions of the first event alone: later ones also inherit what other rows kept");
  app.add_option("--policy", o.policies, "one per row")->required();
  CLI11_PARSE(app, argc, argv);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  try {
    if (!f32.empty() && !std::filesystem::exists(f32)) dequantise(o.model, f32);
    if (!f32.empty()) o.model = f32;
    compare(o);
  } catch (const std::exception& error) {
    std::cerr << "kvkeep_llama_agreement: " << error.what() << '\n';
    return 2;
  }
}
