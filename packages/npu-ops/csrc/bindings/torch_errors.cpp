#include "bindings/torch_errors.h"

#include <sstream>
#include <stdexcept>

namespace npu_ops {

void throw_torch_error(const char* call, const char* file, int line) {
  std::stringstream said;
  const char* what = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  if (what && *what) said << what << "\nThis came of ";
  said << call << " in " << file << ", line " << line << (what && *what ? "." : ", which failed.");
  throw std::runtime_error(said.str());
}

}  // namespace npu_ops
