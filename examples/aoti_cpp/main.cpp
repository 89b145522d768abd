// Runs a model that AOTInductor has packaged and that calls tgemm ops, without Python.
//
//   python examples/aoti_cpp/export.py build/aoti                   # model.pt2, input.pt,
//   expected.pt cmake -S examples/aoti_cpp -B build/aoti -DPython_EXECUTABLE=$(which python) cmake
//   --build build/aoti build/aoti/run_package LIBRARIES build/aoti/model.pt2 build/aoti/input.pt
//   build/aoti/output.pt cpu
//
// LIBRARIES is the folder of libtgemm.so: `python -m torch_gemm info` names it. With `cuda` in
// place of `cpu`, there and for export.py (--device cuda), the same runs on a GPU.

#include <ATen/core/ivalue.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

// Registers the library's ops with torch. The package names them, and finds them in no other way.
void load_library(const fs::path& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error(dlerror());
  }
}

// What torch.save(tensor, path) has written.
at::Tensor read_tensor(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::jit::pickle_load(bytes).toTensor();
}

// For torch.load(path).
void write_tensor(const at::Tensor& tensor, const fs::path& path) {
  const std::vector<char> bytes = torch::jit::pickle_save(tensor);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

void run(const fs::path& libraries, const std::string& package, const fs::path& input,
         const fs::path& output, const std::string& device) {
  load_library(libraries / "libtgemm.so");  // schemas and CPU kernels: always the first
  if (device == "cuda") load_library(libraries / "libtgemm_cuda.so");

  torch::inductor::AOTIModelPackageLoader model(package);
  const at::Tensor x = read_tensor(input).to(at::Device(device));
  const at::Tensor y = model.run({x}).at(0);
  write_tensor(y.cpu(), output);
  std::cout << x.sizes() << " -> " << y.sizes() << " on " << y.device() << '\n';
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  if (given.size() != 5 || (given[4] != "cpu" && given[4] != "cuda")) {
    std::cerr << "usage: run_package LIBRARIES MODEL.pt2 INPUT.pt OUTPUT.pt cpu|cuda\n";
    return 2;
  }
  try {
    run(given[0], given[1], given[2], given[3], given[4]);
  } catch (const std::exception& error) {
    const std::string what = error.what();  // torch adds a backtrace to its sentence
    std::cerr << "run_package: " << what.substr(0, what.find('\n')) << '\n';
    return 2;
  }
  return 0;
}
