// SPDX-License-Identifier: Apache-2.0
// kvkeep plan --gpu: what a GPU serves with a policy and without, on paper.

#include <CLI/App.hpp>
#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "gpu_times.h"
#include "kvkeep/policy/policy.h"
#include "plan.h"
#include "served.h"
#include "serving.h"
#include "shapes.h"

namespace kvkeep::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMemoryShare = 0.9;  // of the GPU's memory: weights and caches
constexpr double kProductShare = 0.5;
constexpr double kLoadShare = 0.8;  // of what the full cache serves
constexpr std::int64_t kRequests = 10000;
constexpr double kMostTokens = 4e9;  // of all answers of a run
constexpr std::int32_t kLongest = 1 << 20;
constexpr const char* kWithGpu = "; allowed with --gpu, or with --memory, --bandwidth and --flops";

std::string number_text(double x, int digits) { return real_cell(x, digits).shown; }

// "0.023", "3.07", "28.5", "1024"
Cell three_digits(double x) { return real_cell(x, x < 1 ? 3 : x < 10 ? 2 : x < 100 ? 1 : 0); }

GpuLimits limits_of(const ServingOptions& s) {
  const bool own = s.memory && s.bandwidth && s.flops;
  KVKEEP_REQUIRE(s.gpu || own,
                 s.memory      ? "--memory"
                 : s.bandwidth ? "--bandwidth"
                               : "--flops",
                 ": a GPU of your own has all three of --memory, --bandwidth and --flops; allowed all of them, or "
                 "beside --gpu ",
                 joined(names_of_gpus()));
  GpuLimits gpu = s.gpu ? gpu_called(*s.gpu) : GpuLimits{.name = "a GPU of your own"};
  if (s.gpu && (s.memory || s.bandwidth || s.flops)) gpu.name += " with numbers of your own";
  if (s.memory) gpu.memory = *s.memory * 1e9;
  if (s.bandwidth) gpu.bandwidth = *s.bandwidth * 1e12;
  if (s.flops) gpu.products = *s.flops * 1e12;
  return gpu;
}

double parameters_for(const PlanOptions& o) {
  if (o.serving.parameters) return *o.serving.parameters * 1e9;
  const double known = parameters_of(o.shape);
  KVKEEP_REQUIRE(
      known > 0, "--parameters: how many ", o.model.empty() ? o.shape : o.model,
      " has is not known here, or a token needs some of them only; allowed a number in 1e9, of a model whose "
      "tokens need all");
  return known;
}

struct OnGpu {
  const PlanOptions& o;
  GpuLimits gpu;
  Roofline roofline;
  std::int64_t room;
  Course full, cut;
  std::string name, priced;
  double rate = 0;
  struct Row {
    double rate;  // 0: at once
    std::string cache;
    Served served;
  };
  std::vector<Row> rows = {};

  [[nodiscard]] std::int64_t fit_full() const { return requests_that_fit(full, room); }
  [[nodiscard]] std::int64_t fit_cut() const { return requests_that_fit(cut, room); }
};

// 1, 4, 16, ... and what fits.
std::set<std::int64_t> numbers_in_flight(const OnGpu& out) {
  std::set<std::int64_t> all{out.fit_full(), out.fit_cut()};
  for (std::int64_t n = 1; n < *all.rbegin(); n *= 4) all.insert(n);
  all.erase(0);
  return all;
}

Table steps_table(const OnGpu& out) {
  Table table({{"in_flight", "in flight"},
               {"full_ms", "full: ms a step"},
               {"full_tokens_s", "tokens/s"},
               {"policy_ms", text(out.name, ": ms a step")},
               {"events_ms", "of it events"},
               {"policy_tokens_s", "tokens/s"},
               {"to_full", "to full"}});
  const Cell none(nullptr, "-");
  for (const std::int64_t n : numbers_in_flight(out)) {
    const auto many = static_cast<double>(n);
    const double full = out.roofline.decode(out.full, n), events = many * out.cut.mean_event(),
                 cut = out.roofline.decode(out.cut, n) + events;
    const bool has_full = n <= out.fit_full(), has_cut = n <= out.fit_cut();
    table.add({n, has_full ? three_digits(full * 1e3) : none, has_full ? real_cell(many / full, 0) : none,
               has_cut ? three_digits(cut * 1e3) : none, has_cut ? three_digits(events * 1e3) : none,
               has_cut ? real_cell(many / cut, 0) : none, has_full && has_cut ? real_cell(full / cut, 2) : none});
  }
  return table;
}

Table served_table(const OnGpu& out) {
  Table table({{"arrivals_s", "arrivals/s"},
               {"cache", "cache", false},
               {"tokens_s", "tokens/s"},
               {"in_flight", "in flight"},
               {"most", "most"},
               {"away", "away"},
               {"first_s_50", "first s: 50 %"},
               {"first_s_90", "90 %"},
               {"first_s_99", "99 %"},
               {"between_ms_50", "next ms: 50 %"},
               {"between_ms_90", "90 %"},
               {"between_ms_99", "99 %"}});
  for (const OnGpu::Row& row : out.rows) {
    const Served& s = row.served;
    std::vector<Cell> cells{row.rate > 0 ? three_digits(row.rate) : Cell(nullptr, "at once"),
                            row.cache,
                            real_cell(s.tokens_per_second(), 0),
                            three_digits(s.in_flight),
                            s.most_at_once,
                            s.away};
    for (const double first : s.first)  // who waits for all others is no measure of anything
      cells.push_back(row.rate > 0 ? three_digits(first) : Cell(nullptr, "-"));
    for (const double between : s.between) cells.push_back(three_digits(between * 1e3));
    table.add(std::move(cells));
  }
  return table;
}

// What the tables come to: where it pays and where it does not.
std::string said(const OnGpu& out) {
  const Roofline& r = out.roofline;
  const std::int64_t most = out.fit_full();
  const auto tokens = [&](std::int64_t n) { return std::llround(break_even(r, out.cut, n)); };
  std::string all =
      text("- Break-even: a step under ", out.name, " takes as long as one over a full cache of ", tokens(1), " tokens",
           most > 1 ? text(", with ", most, " in flight\n  ", tokens(most)) : "",
           ". Shorter texts lose time: showing the queries takes ",
           number_text(r.showing(out.cut.shows_queries ? 1 : 0) * 1e3, 2), " ms of a step of one, events take ",
           number_text(out.cut.mean_event() * 1e6, 1), " us\n  of every step for each in flight.\n");
  const double whole = r.prompt(out.full), prompt = r.prompt(out.cut);
  all +=
      text("- A prompt takes ", number_text(whole, 2), " s by itself, ", number_text(prompt, 2), " under ", out.name);
  if (most > 0) {
    const double prompts = static_cast<double>(most) * whole,
                 steps = r.decode(out.full, most) * out.full.decode_steps();
    all += text(": ", share_cell(prompts / (prompts + steps)).shown, " of what ", most,
                " in flight with a full cache take");
  }
  const bool shorter = prompt < 0.9 * whole;
  return all + (shorter ? ", since its later pieces see few slots.\n"
                        : ".\n  Operations limit prompts; eviction gains in the steps after them, and room.\n");
}

std::string assumed(const OnGpu& out) {
  const ServingOptions& s = out.o.serving;
  const auto digits = [](double x) { return number_text(x, 2); };
  std::string all =
      text("Assumed:\n- ", out.gpu.name, ": ", number_text(out.gpu.memory / 1e9, 0),
           " GB, of which weights and caches take ", number_text(kMemoryShare * 100, 0), " %; reads ",
           digits(out.gpu.bandwidth / 1e12), " TB/s; bf16 products ", number_text(out.gpu.products / 1e12, 0),
           " TFLOP/s", s.gpu && !s.bandwidth && !s.flops ? ",\n  as an H100 reached of its nominal ones" : "", ".\n");
  all += text("- The model: ", number_text(out.roofline.parameters / 1e9, 2),
              "e9 numbers in bf16, read once a step; its products reach ",
              number_text(out.roofline.products / out.gpu.products * 100, 0), " % of those.\n");
  all += text("- A step: weights, caches, prompts and queries one after the other, ",
              number_text(out.roofline.gaps * 1e3, 2),
              " ms between its kernels, and nothing\n"
              "  else: no host, sampling or network. Prompts come in pieces of ",
              out.full.piece, " tokens.\n");
  all += text("- An event: ", out.priced, ";\n  between sizes by the bytes that must move. Events of a step add up.\n");
  all += text("- When memory is short the newest request leaves for the host's memory, at ",
              number_text(kHostLink / 1e9, 0), " GB/s both ways.\n");
  all += text("- All requests are alike. They arrive at random (Poisson)",
              s.rate ? ""
                     : text(", ", number_text(kLoadShare, 1), " times as many as ", out.rows.front().cache,
                            " serves when all are there at once"),
              ".\n");
  return all + "- What they answer is not predicted: kvkeep eval measures that.\n";
}

std::string markdown(const OnGpu& out) {
  const auto bytes = [](std::int64_t n) { return bytes_cell(n).shown; };
  const PlanOptions& o = out.o;
  return text(
      "A prediction by arithmetic: nothing was run. ", o.model.empty() ? o.shape : o.model, " on ",
      o.serving.gpu ? text("one ", out.gpu.name) : out.gpu.name, ", prompts of ", o.prompt, " tokens, answers of ",
      out.full.answer(), ".\nCaches have ", bytes(out.room), ". A request holds ", bytes(out.full.most_after_prompt()),
      " after its prompt, ", bytes(out.cut.most_after_prompt()), " under ", out.name, ": ", out.fit_full(), " and ",
      out.fit_cut(),
      " fit\nat their most, while one more "
      "prompt comes in.\n\nA step that writes answers:\n\n",
      steps_table(out).markdown(), "\n", out.rows.front().served.finished,
      " requests, with their prompts. In flight: at once, on average and at most; away: times that one left for the\n"
      "host's memory; first: seconds to the first token; next: milliseconds from one token to the next:\n\n",
      served_table(out).markdown(), "\n", said(out), "\n", assumed(out));
}

std::string json(const OnGpu& out) {
  const PlanOptions& o = out.o;
  const auto course = [&](const Course& c, std::int64_t fits) -> Json {
    return {{"most_bytes", c.most_held(0)},
            {"most_bytes_after_prompt", c.most_after_prompt()},
            {"event_bytes", c.scratch},
            {"requests_that_fit", fits},
            {"mean_read_bytes", c.mean_read()},
            {"event_seconds_a_token", c.mean_event()},
            {"prompt_seconds", out.roofline.prompt(c)}};
  };
  const std::int64_t most = std::max<std::int64_t>(1, out.fit_full());
  Json all{{"prediction", true},
           {"model", o.model.empty() ? o.shape : o.model},
           {"policy", out.name},
           {"prompt", o.prompt},
           {"length", o.length},
           {"gpu",
            {{"name", out.gpu.name},
             {"memory_bytes", out.gpu.memory},
             {"bytes_a_second", out.gpu.bandwidth},
             {"operations_a_second", out.gpu.products}}},
           {"assumed",
            {{"parameters", out.roofline.parameters},
             {"memory_share", kMemoryShare},
             {"model_operations_a_second", out.roofline.products},
             {"gaps_seconds_a_step", out.roofline.gaps},
             {"piece", out.full.piece},
             {"event", out.priced},
             {"host_bytes_a_second", kHostLink}}},
           {"room_bytes", out.room},
           {"full", course(out.full, out.fit_full())},
           {"cut", course(out.cut, out.fit_cut())},
           {"break_even_tokens",
            {{"one", break_even(out.roofline, out.cut, 1)}, {"most_of_full", break_even(out.roofline, out.cut, most)}}},
           {"steps", steps_table(out).json()},
           {"served", served_table(out).json()}};
  for (std::size_t i = 0; i < out.rows.size(); ++i) {
    const Served& s = out.rows[i].served;
    all["served"][i].update(Json{{"finished", s.finished},
                                 {"tokens", s.tokens},
                                 {"steps", s.steps},
                                 {"events", s.events},
                                 {"seconds", s.seconds},
                                 {"most_bytes", s.most_bytes}});
  }
  return io::written(all, 2) + "\n";
}

}  // namespace

void add_serving(CLI::App& plan, ServingOptions& s) {
  constexpr double kMost = 1e6;
  const auto real = [&](const char* name, std::optional<double>& to, double least, double most, const char* help,
                        const char* shown) {
    plan.add_option(name, to, help)
        ->check([=](const std::string& given) {
          double x = NAN;
          const bool read = CLI::detail::lexical_cast(given, x);
          return read && x >= least && x <= most
                     ? std::string()
                     : text("'", given, "' is no number in the range; allowed ", number_text(least, least < 1 ? 3 : 0),
                            " to ", number_text(most, 0));
        })
        ->option_text(shown);
  };
  plan.add_option("--gpu", s.gpu, "predict what one of these serves, on paper")
      ->check(one_of(names_of_gpus()))
      ->option_text("a100-80|h100|h200|b200");
  real("--memory", s.memory, 0.001, kMost, "with --gpu or instead of it: memory in GB", "GB");
  real("--bandwidth", s.bandwidth, 0.001, kMost, "the same: bytes that are read, in TB/s", "TB/S");
  real("--flops", s.flops, 0.001, kMost, "the same: bf16 operations that are reached, in TFLOP/s", "TFLOP/S");
  real("--parameters", s.parameters, 0.001, kMost, "of the model, in 1e9; known of names, but for mixtures of experts",
       "N");
  real("--utilisation", s.utilisation, 0.01, 1, "of those operations that the model's products reach", "X [0.5]");
  real("--event-us", s.event_us, 0, 1e9, "an event of one sequence in us, instead of what was measured", "US");
  real("--rate", s.rate, 0.001, kMost, "requests that arrive in a second, on average", "X [0.8 of what full serves]");
  plan.add_option("--requests", s.requests, "how many arrive")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
      ->option_text(text("N [", kRequests, "]"));
  plan.add_option("--seed", s.seed, "arrivals follow from it")->option_text("N [1]");
}

void refuse_without_gpu(const ServingOptions& s) {
  for (const auto& [given, name] : {std::pair(s.parameters.has_value(), "--parameters"),
                                    {s.utilisation.has_value(), "--utilisation"},
                                    {s.event_us.has_value(), "--event-us"},
                                    {s.rate.has_value(), "--rate"},
                                    {s.requests.has_value(), "--requests"},
                                    {s.seed.has_value(), "--seed"}})
    KVKEEP_REQUIRE(!given, name, ": what a GPU serves was not asked", kWithGpu);
}

std::string serving_text(const PlanOptions& o, const ModelSpec& spec, const KVPolicy& policy,
                         const SequencePlan& plan) {
  const ServingOptions& s = o.serving;
  KVKEEP_REQUIRE_AS(Unsupported, !policy.narrows() && policy.memory() == nullptr, "--policy: the text decides what ",
                    policy.name(), " holds; allowed with --gpu: policies that neither fold nor narrow prompts");
  KVKEEP_REQUIRE_AS(Unsupported, policy.trigger().kind != Trigger::Kind::named,
                    "--policy: under trigger=named the "
                    "program says when ",
                    policy.name(), " cuts; allowed with --gpu: slack, counter");
  KVKEEP_REQUIRE(o.batch == 1, "--batch: ", o.batch, ", but the GPU's memory says how many run; allowed without --gpu");
  KVKEEP_REQUIRE(o.prompt >= 1 && o.length - o.prompt >= 3, "--prompt: ", o.prompt, " of ", o.length,
                 " tokens; allowed with --gpu: 1 to --length less 3, so that a request has a prompt and an answer");
  KVKEEP_REQUIRE(o.length <= kLongest, "--length: ", o.length, " tokens; allowed with --gpu: up to ", kLongest);
  const std::int64_t requests = s.requests.value_or(kRequests);
  KVKEEP_REQUIRE(static_cast<double>(requests) * o.length <= 10 * kMostTokens &&
                     static_cast<double>(requests) * (o.length - o.prompt) <= kMostTokens,
                 "--requests: ", requests, " of ", o.length, " tokens are too many to follow; allowed fewer, ",
                 number_text(kMostTokens, 0), " tokens of answers in all and ten times that with prompts");
  const GpuLimits gpu = limits_of(s);
  const double parameters = parameters_for(o);
  std::optional<EventPrice> price;
  if (!policy.trigger().never)
    price = s.event_us ? EventPrice(*s.event_us * 1e-6) : EventPrice(spec, policy, plan.dtype, gpu);
  const auto room = static_cast<std::int64_t>(kMemoryShare * gpu.memory - 2 * parameters);
  KVKEEP_REQUIRE(
      room > 0, "--gpu: the weights take ", bytes_cell(static_cast<std::int64_t>(2 * parameters)).shown,
      " in bf16 and ", gpu.name, " has ", bytes_cell(static_cast<std::int64_t>(gpu.memory)).shown,
      ", a tenth of it for other things; allowed a smaller model, or --memory of several GPUs that act as one");
  const std::unique_ptr<KVPolicy> nothing = make_policy("full");
  OnGpu out{o,
            gpu,
            roofline_of(spec, parameters, gpu, s.utilisation.value_or(kProductShare)),
            room,
            course_of(spec, *nothing, plan, std::nullopt),
            course_of(spec, policy, plan, price),
            std::string(policy.name()),
            price ? price->said() : "none"};
  // A text that no full cache holds may fit under a policy.
  std::vector<std::pair<std::string, const Course*>> caches{{out.name, &out.cut}};
  if (out.fit_full() > 0) caches.insert(caches.begin(), {"full", &out.full});
  Progress progress(2 * std::ssize(caches), o.output.quiet);
  progress.label(text("serving ", requests, " requests on paper"));
  const auto run_at = [&](double rate) {
    for (const auto& [name, course] : caches) {
      const Load load{.requests = requests, .rate = rate, .seed = s.seed.value_or(1)};
      out.rows.push_back({rate, name, serve(*course, out.roofline, out.room, load)});
      progress.advance(std::ssize(out.rows));
    }
  };
  run_at(0);
  const Served& most = out.rows.front().served;
  // Two digits.
  const double capacity = kLoadShare * static_cast<double>(most.finished) / most.seconds,
               digits = std::pow(10, std::floor(std::log10(capacity)) - 1);
  run_at(s.rate.value_or(std::round(capacity / digits) * digits));
  std::rotate(out.rows.begin(), out.rows.begin() + std::ssize(caches), out.rows.end());
  progress.clear();
  return o.output.format == Format::md    ? markdown(out)
         : o.output.format == Format::csv ? served_table(out).csv()
                                          : json(out);
}

}  // namespace kvkeep::cli
