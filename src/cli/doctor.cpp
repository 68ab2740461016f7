// SPDX-License-Identifier: Apache-2.0
// kvkeep doctor: does this build fit this machine?

#include <hwy/targets.h>

#include <CLI/Option.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/plugin.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/version.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kDoctorExamples = R"(
Examples:
  kvkeep doctor             versions, CPU, threads, memory, CUDA, and a verdict; exit status 0 when kvkeep works here
  kvkeep doctor -o json     the same for a bug report
  kvkeep doctor --quick     without measuring the memory bandwidth
)";

struct DoctorOptions {
  bool quick = false;
  OutputOptions output;
};

// The best instruction set that is compiled in and that this machine has. Lower bits are better targets.
std::string simd_target() {
  const std::int64_t usable = hwy::SupportedTargets();
  return usable == 0 ? "none" : hwy::TargetName(usable & -usable);
}

// Bytes read and written per second by one thread's memcpy of 256 MiB, best of three.
double memcpy_bandwidth() {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), kBytes);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * static_cast<double>(kBytes) / seconds);
  }
  return best;
}

std::vector<Finding> look(const Program& program, const DoctorOptions& o) {
  std::vector<Finding> all{{"kvkeep", kVersion}, {"CPU", text("kvkeep uses ", simd_target())}};
  for (Finding& finding : program.findings()) all.push_back(std::move(finding));
  if (!o.quick)
    all.push_back({"memory", text("memcpy ", real_cell(memcpy_bandwidth() / 1e9, 1).shown,
                                  " GB/s read and written, one thread")});
  all.push_back({"policies", text(policies().size(), " known; kvkeep policies lists them")});
  for (const std::filesystem::path& plugin : loaded_plugins()) all.push_back({"plug-in", plugin.string()});
  return all;
}

void run(const Program& program, const DoctorOptions& o) {
  const std::vector<Finding> findings = look(program, o);
  const bool fine = std::all_of(findings.begin(), findings.end(), [](const Finding& f) { return f.fine; });
  const std::string verdict =
      fine ? "kvkeep works here, on the CPU" : "kvkeep does not fit this machine; see the rows marked NO";
  Table table({{"what", "what", false}, {"value", "found", false}, {"fine", "fine", false}});
  for (const Finding& f : findings) table.add({f.what, f.value, Cell(f.fine, f.fine ? "yes" : "NO")});
  table.add({"verdict", verdict, Cell(fine, fine ? "yes" : "NO")});
  print(table.text(o.output.format));
  KVKEEP_REQUIRE_AS(Error, fine, "doctor: ", verdict);
}

}  // namespace

Run add_doctor(CLI::App& app, const Program& program) {
  CLI::App* sub =
      app.add_subcommand("doctor", "check that this build fits this machine: versions, ABI, CPU, CUDA, one verdict");
  auto o = std::make_shared<DoctorOptions>();
  sub->add_flag("--quick", o->quick, "do not measure the memory bandwidth");
  o->output.add(*sub);
  sub->footer(kDoctorExamples);
  return [&program, o] { run(program, *o); };
}

}  // namespace kvkeep::cli
