// A launch of a compiled Triton kernel: its arguments become words of 8 bytes, then its library is called. In C++ since the
// launch of a small kernel costs more than the kernel; npu_platform/triton/launcher.py says which argument is what.
#include "triton_launcher.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace py = pybind11;

namespace npu {
namespace {

// Of the generated libraries: npu_triton_launch. Returns the error, or null.
using Entry = const char* (*)(const void* table, int device, int x, int y, int z, const void* words);

// What Triton passes before the arguments of the kernel.
enum Place : Py_ssize_t { kX, kY, kZ, kDevice, kEntry, kKernelMetadata, kLaunchMetadata, kEnterHook, kExitHook, kArguments };

struct Signature {
  std::string kinds;               // of the words: a letter each
  std::vector<Py_ssize_t> places;  // of their arguments
  Py_ssize_t arguments;
  const void* table;
  py::object error;
  py::object of_host;  // the error for a tensor of the host
};

constexpr const char* kCapsule = "npu_platform.triton.signature";

template <class T>
bool put(int64_t* word, T value) {
  std::memcpy(word, &value, sizeof(T));  // little-endian: the value comes first
  return !PyErr_Occurred();
}

// Writes the address of a tensor, of something like one, or a number; false: a Python error is set.
bool put_address(const Signature& signature, PyObject* given, int64_t* word) {
  if (given == Py_None) return put(word, int64_t(0));
  if (THPVariable_Check(given)) {
    const at::Tensor& tensor = THPVariable_Unpack(given);
    if (tensor.is_cpu() && !tensor.is_pinned()) {
      PyErr_SetString(signature.of_host.ptr(),
                      "A Triton kernel on npu got a tensor of the host: move it to npu, or pin its memory.");
      return false;
    }
    return put(word, tensor.data_ptr());
  }
  if (PyLong_Check(given)) return put(word, PyLong_AsUnsignedLongLong(given));
  const auto address = py::reinterpret_steal<py::object>(PyObject_CallMethod(given, "data_ptr", nullptr));
  return address && put(word, PyLong_AsUnsignedLongLong(address.ptr()));
}

bool put_unsigned(PyObject* given, int64_t* word) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(given));
  return number && put(word, PyLong_AsUnsignedLongLong(number.ptr()));
}

bool put_argument(const Signature& signature, char kind, PyObject* given, int64_t* word) {
  switch (kind) {
    case '*': return put_address(signature, given, word);
    case 'f': return put(word, float(PyFloat_AsDouble(given)));
    case 'd': return put(word, PyFloat_AsDouble(given));
    case 'e': return put(word, c10::Half(float(PyFloat_AsDouble(given))));
    case 'b': return put(word, c10::BFloat16(float(PyFloat_AsDouble(given))));
    case '?': return put(word, bool(PyObject_IsTrue(given) > 0));
    case 'u': return put_unsigned(given, word);
    default: return put(word, PyLong_AsLongLong(given));
  }
}

// A hook is None or a chain of calls, which is empty as a rule.
bool call_hook(PyObject* hook, PyObject* metadata) {
  if (hook == Py_None) return true;
  static PyObject* const name = PyUnicode_InternFromString("calls");
  const auto calls = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook, name));
  if (!calls) PyErr_Clear();
  if (calls && PyList_Check(calls.ptr()) && PyList_GET_SIZE(calls.ptr()) == 0) return true;
  return bool(py::reinterpret_steal<py::object>(PyObject_CallOneArg(hook, metadata)));
}

PyObject* launch(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto& signature = *static_cast<const Signature*>(PyCapsule_GetPointer(self, kCapsule));
  if (count != kArguments + signature.arguments) {
    return PyErr_Format(PyExc_TypeError, "this kernel takes %zd arguments, not %zd", signature.arguments, count - kArguments);
  }
  const long x = PyLong_AsLong(given[kX]), y = PyLong_AsLong(given[kY]), z = PyLong_AsLong(given[kZ]);
  const long device = PyLong_AsLong(given[kDevice]);
  const auto entry = reinterpret_cast<Entry>(PyLong_AsVoidPtr(given[kEntry]));
  if (PyErr_Occurred()) return nullptr;
  if (x <= 0 || y <= 0 || z <= 0) Py_RETURN_NONE;
  long programs;
  if (std::max({x, y, z}) > INT_MAX || __builtin_mul_overflow(x, y, &programs) || __builtin_mul_overflow(programs, z, &programs)) {
    return PyErr_Format(signature.error.ptr(), "A Triton kernel's grid of %ld x %ld x %ld programs is too large: %s", x, y, z,
                        "an axis has at most 2147483647 (let each program do more).");
  }
  c10::SmallVector<int64_t, 64> words(signature.kinds.size());
  for (size_t i = 0; i < words.size(); i++) {
    if (!put_argument(signature, signature.kinds[i], given[kArguments + signature.places[i]], &words[i])) return nullptr;
  }
  if (!call_hook(given[kEnterHook], given[kLaunchMetadata])) return nullptr;
  const char* error = nullptr;
  {
    py::gil_scoped_release others_run;
    error = entry(signature.table, int(device), int(x), int(y), int(z), words.data());
  }
  if (error != nullptr) return PyErr_Format(signature.error.ptr(), "%s", error);
  if (!call_hook(given[kExitHook], given[kLaunchMetadata])) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// What Triton asks at each launch, the first for each tensor of it: a call of a Python function, or through pybind11, would
// take longer than what is done here with the argument.

// By what an address is to be told apart: kernels are the same for all addresses.
PyObject* no_specialization(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) {
  static PyObject* const nothing = PyUnicode_InternFromString("");
  return Py_NewRef(nothing);
}

PyObject* current_device(PyObject*, PyObject*) { return PyLong_FromLong(thread_state.device); }

PyMethodDef no_specialization_method = {
    "no_specialization", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(no_specialization)),
    METH_FASTCALL | METH_KEYWORDS, "Return nothing by which kernels would be told apart."};

PyMethodDef current_device_method = {"current_device", current_device, METH_NOARGS, "Return the thread's current device."};

PyMethodDef launch_method = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)), METH_FASTCALL,
                             "Launch the kernel, with what Triton passes."};

py::object make_launcher(std::string kinds, std::vector<Py_ssize_t> places, Py_ssize_t arguments, size_t table, py::object error,
                         py::object of_host) {
  auto signature = std::make_unique<Signature>(Signature{std::move(kinds), std::move(places), arguments,
                                                         reinterpret_cast<const void*>(table), std::move(error),
                                                         std::move(of_host)});
  for (const auto place : signature->places) TORCH_CHECK_INDEX(place >= 0 && place < arguments, "no argument ", place);
  TORCH_CHECK_VALUE(signature->places.size() == signature->kinds.size(), "each word has a kind and a place");
  const py::capsule self(signature.release(), kCapsule, [](void* owned) { delete static_cast<Signature*>(owned); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&launch_method, self.ptr()));
}

}  // namespace

void define_triton_launcher(py::module_& m) {
  m.def("triton_launcher", &make_launcher, py::arg("kinds"), py::arg("places"), py::arg("arguments"), py::arg("table"),
        py::arg("error"), py::arg("of_host"));
  const auto function = [](PyMethodDef& method) {
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr));
  };
  m.attr("triton_no_specialization") = function(no_specialization_method);
  m.attr("triton_current_device") = function(current_device_method);
}

}  // namespace npu
