// SPDX-License-Identifier: Apache-2.0
#include "checkpoint.h"

#include <filesystem>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"

namespace train {

void save_checkpoint(const std::string& path, const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                     const Progress& progress) {
  torch::serialize::OutputArchive archive, model_part, optimizer_part;
  model.save(model_part);
  optimizer.save(optimizer_part);
  archive.write("model", model_part);
  archive.write("optimizer", optimizer_part);
  archive.write("seed", c10::IValue(static_cast<int64_t>(progress.seed)));
  archive.write("step", c10::IValue(progress.step));
  archive.write("seconds", c10::IValue(progress.seconds));
  archive.write("settings", c10::IValue(progress.settings));
  const kvkeep::io::RemovedOnSignal unfinished(path + ".part");
  archive.save_to(path + ".part");
  std::filesystem::rename(path + ".part", path);
}

Progress load_checkpoint(const std::string& path, torch::nn::Module& model, torch::optim::Optimizer& optimizer) {
  KVKEEP_REQUIRE(std::filesystem::exists(path), "--resume: no checkpoint; given ", path,
                 "; allowed a file that this program wrote");
  try {
    torch::serialize::InputArchive archive, model_part, optimizer_part;
    archive.load_from(path);
    archive.read("model", model_part);
    archive.read("optimizer", optimizer_part);
    model.load(model_part);
    optimizer.load(optimizer_part);
    c10::IValue seed, step, seconds;
    archive.read("seed", seed);
    archive.read("step", step);
    archive.read("seconds", seconds);
    c10::IValue settings;
    const bool told = archive.try_read("settings", settings);
    return {static_cast<uint64_t>(seed.toInt()), step.toInt(), seconds.toDouble(), told ? settings.toStringRef() : ""};
  } catch (const c10::Error& error) {
    kvkeep::refuse("--resume: cannot read the checkpoint; given ", path, " (", error.what_without_backtrace(),
                   "); allowed a file of this model");
  }
}

}  // namespace train
