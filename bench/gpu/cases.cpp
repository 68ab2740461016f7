// SPDX-License-Identifier: Apache-2.0
// kvkeep_gpu_bench, and kvkeep_cuda_model_bench, in which the execution model replaces the GPU. See --help.

#include "cases.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "kvkeep/core/error.h"
#include "kvkeep/torch.h"
#include "machine.h"
#include "timing.h"

namespace kvkeep::cuda {
namespace {

struct Case {
  std::string name;
  std::function<void(Result&)> body;
};
std::vector<Case> cases;
BenchOptions chosen;

constexpr const char* kHelp =
    R"(Times the kernels and whole events, each checked against its reference before it is timed.

  --filter REGEX   cases whose name matches
  --out FILE       one line of JSON when a case begins, one when it ends
  --seconds N      begin no further case after N seconds
  --once           check, then launch once: for profilers and sanitizers
  --toy            small sizes; the execution model has no others
  --list           names only
Exit status: 1 if a row differs from its reference, 2 if nothing could run.
)";

int refuse_usage(const std::string& why) {
  std::fprintf(stderr, "bench: %s; see --help\n", why.c_str());
  return 2;
}

class Lines {
 public:
  explicit Lines(const std::string& path) {
    if (!path.empty()) file_.open(path, std::ios::app);
  }
  [[nodiscard]] bool good() const { return file_.good(); }
  void write(const nlohmann::json& line) {
    file_ << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }

 private:
  std::ofstream file_;
};

void run(const Case& one, Lines& lines, int& failed) {
  lines.write({{"begins", one.name}});
  Result result;
  double ms = 0;
  try {
    ms = milliseconds([&] { one.body(result); });
  } catch (const std::exception& error) {
    result.fail(error.what());
  }
  nlohmann::json line{{"case", one.name}, {"took_ms", ms}};
  for (const auto& [what, number] : result.numbers) line[what] = number;
  if (!result.error.empty()) line["error"] = result.error;
  lines.write(line);
  failed += result.error.empty() ? 0 : 1;
  std::printf("%-64s", one.name.c_str());
  for (const auto& [what, number] : result.numbers) std::printf(" %s=%.4g", what.c_str(), number);
  std::printf("%s%s\n", result.error.empty() ? "" : " ERROR: ", result.error.c_str());
  std::fflush(stdout);
}

int run_all() {
  Lines lines(chosen.out);
  if (!lines.good() && !chosen.out.empty()) return refuse_usage(text("cannot write to ", chosen.out));
  const std::regex wanted(chosen.filter);
  const auto begin = std::chrono::steady_clock::now();
  lines.write({{"machine", machine_name()}, {"model", kModel}});
  std::printf("%s\n", machine_name().c_str());
  int ran = 0, failed = 0, left = 0;
  for (const Case& one : cases) {
    if (!std::regex_search(one.name, wanted)) continue;
    if (chosen.seconds > 0 &&
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > chosen.seconds) {
      lines.write({{"left_out", one.name}});
      ++left;
      continue;
    }
    run(one, lines, failed);
    ++ran;
  }
  lines.write({{"ended", true}, {"ran", ran}, {"failed", failed}});
  std::printf("%d cases, %d failed, %d left out for lack of time\n", ran, failed, left);
  if (ran == 0) return refuse_usage(text("no case is named like '", chosen.filter, "'"));
  return failed == 0 ? 0 : 1;
}

}  // namespace

const BenchOptions& options() { return chosen; }

std::vector<Shape> shapes() {
  if (chosen.toy) return {{"toy", 2, 2, 64, 2}};
  return {{"qwen7b", 28, 4, 128, 7}, {"llama8b", 32, 8, 128, 4}};
}

void add(std::string name, std::function<void(Result&)> body) { cases.push_back({std::move(name), std::move(body)}); }

void add(const char* kernel, Body body, std::initializer_list<Size> sizes, std::initializer_list<Size> toy) {
  for (const Shape& shape : shapes())
    for (const Size& s : chosen.toy ? toy : sizes)
      add(text(kernel, "/", shape.name, "/batch:", s.batch, "/", s.length, "->", s.budget),
          [=](Result& result) { body(result, shape, s); });
}

int main_of_benches(int count, char** words) {
  use_torch();
  const UsingThreads threads(torch_threads());
  bool list = false;
  chosen.toy = kModel;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const auto value = [&]() -> const char* { return i + 1 < count ? words[++i] : nullptr; };
    if (word == "--toy")
      chosen.toy = true;
    else if (word == "--once")
      chosen.once = true;
    else if (word == "--list")
      list = true;
    else if (word == "--help")
      return std::fputs(kHelp, stdout), 0;
    else if (word == "--filter" || word == "--out" || word == "--seconds") {
      const char* given = value();
      if (given == nullptr) return refuse_usage(word + ": a value is missing");
      if (word == "--filter")
        chosen.filter = given;
      else if (word == "--out")
        chosen.out = given;
      else
        chosen.seconds = std::strtod(given, nullptr);
    } else
      return refuse_usage("unknown option; given '" + word + "'");
  }
  for (const auto& adds :
       {add_ceilings, add_events, add_keeping, add_scorers, add_prefill, add_memory, add_eigensolver})
    adds();
  if (list) {
    for (const Case& one : cases) std::puts(one.name.c_str());
    return 0;
  }
  if (!has_machine()) {
    std::fputs("bench: there is no GPU here\n", stderr);
    return 2;
  }
  return run_all();
}

}  // namespace kvkeep::cuda

int main(int argc, char** argv) { return kvkeep::cuda::main_of_benches(argc, argv); }
