#include <kvkeep/core/error.h>
#include <kvkeep/version.h>

#include <iostream>

int main() {
  kvkeep::require(sizeof(kvkeep::kVersion) > 1, "consumer: no version");
  std::cout << "kvkeep " << kvkeep::kVersion << " with LibTorch " << kvkeep::kTorchVersion << "\n";
}
