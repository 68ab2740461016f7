// Precompiled for targets of many files (kvkeep_precompile): what most of them include, and what takes longest to read.
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>
