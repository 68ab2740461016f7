// kvkeep doctor: does this build fit this machine?

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <hwy/targets.h>

#include <CLI/Option.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <regex>
#include <thread>
#include <vector>

#include "commands.h"
#include "device.h"
#include "kvkeep/core/error.h"
#include "kvkeep/policy/registry.h"
#include "kvkeep/version.h"
#include "options.h"

namespace kvkeep::cli {
namespace {

namespace fs = std::filesystem;

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

struct Finding {
  std::string what, value;
  bool fine = true;
};

std::string first_match(const std::string& text, const char* pattern, const char* otherwise) {
  std::smatch found;
  return std::regex_search(text, found, std::regex(pattern)) ? found[1].str() : std::string(otherwise);
}

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

Finding torch_finding() {
  const std::string loaded = first_match(at::show_config(), "TORCH_VERSION=([0-9.]+)", "unknown");
  const std::string compiled = kTorchVersion;
  const bool same = loaded == "unknown" || compiled.starts_with(loaded) || loaded.starts_with(compiled);
  return {"LibTorch",
          text("compiled against ", compiled, ", loaded ", loaded,
               same ? "" : "; they differ: rebuild kvkeep for the one that is loaded"),
          same};
}

Finding abi_finding() {
#ifdef _GLIBCXX_USE_CXX11_ABI
  const std::string compiled = std::to_string(_GLIBCXX_USE_CXX11_ABI);
  const std::string loaded = first_match(at::show_config(), "_GLIBCXX_USE_CXX11_ABI=([01])", compiled.c_str());
  return {"C++ ABI",
          text("_GLIBCXX_USE_CXX11_ABI=", compiled, compiled == loaded ? ", as LibTorch" : ", LibTorch has " + loaded),
          compiled == loaded};
#else
  return {"C++ ABI", "not libstdc++"};
#endif
}

Finding cuda_finding() {
  const bool card = fs::exists("/dev/nvidiactl") || fs::exists("/proc/driver/nvidia/version");
  const std::string driver = card ? "there is an NVIDIA driver here" : "there is no NVIDIA driver here";
#ifdef KVKEEP_CLI_CUDA
  if (!card) return {"CUDA", "kernels are compiled in; " + driver};
  try {
    static_cast<void>(DeviceOptions{"cuda:0"}.accelerator());
    return {"CUDA", "kernels are compiled in; they find cuda:0"};
  } catch (const std::exception& error) {  // the driver may be too old, or LibTorch may be without CUDA
    return {"CUDA", text("kernels are compiled in; ", driver, "; cuda:0 cannot be used: ", error.what()), false};
  }
#else
  return {"CUDA", "not compiled in; " + driver};
#endif
}

/// How threads wait for each other, according to the variables that LibTorch's OpenMP runtime reads.
std::string waiting() {
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
    if (const char* value = std::getenv(name)) return text(name, "=", value);
  return "the OpenMP runtime's default";
}

std::vector<Finding> look(const DoctorOptions& o) {
  std::vector<Finding> all{{"kvkeep", kVersion},
                           torch_finding(),
                           abi_finding(),
                           {"CPU", text("kvkeep uses ", simd_target(), ", LibTorch ", at::get_cpu_capability())},
                           {"threads", text(at::get_num_threads(), " of ", std::thread::hardware_concurrency(),
                                            " hardware threads; waiting: ", waiting())}};
  if (!o.quick)
    all.push_back({"memory", text("memcpy ", real_cell(memcpy_bandwidth() / 1e9, 1).shown,
                                  " GB/s read and written, one thread")});
  all.push_back(cuda_finding());
  all.push_back({"policies", text(policies().size(), " known; kvkeep policies lists them")});
  return all;
}

void run(const DoctorOptions& o) {
  const std::vector<Finding> findings = look(o);
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

Run add_doctor(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("doctor", "check that this build fits this machine: versions, ABI, CPU, CUDA, one verdict");
  auto o = std::make_shared<DoctorOptions>();
  sub->add_flag("--quick", o->quick, "do not measure the memory bandwidth");
  o->output.add(*sub);
  sub->footer(kDoctorExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
