// A CUDA device for torch's CPU wheel: it has streams and events, and computes nothing.
//
// torch asks two tables about a kind of device. The CPU wheel leaves the entries of CUDA empty, and importing torch
// fixes them; so this library is loaded before. With both filled, FakeTensorMode makes tensors on cuda:0, and autograd
// runs their backward on a thread of the device, on the stream of the forward, as it does on a GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

using namespace c10;

using Told = void (*)(long what, long stream);
Told told_record = nullptr;  // an event notes what its stream has done
Told told_block = nullptr;   // a stream waits for an event
Told told_use = nullptr;     // a storage is used on a stream that did not allocate it
thread_local StreamId current = 0;
std::atomic<long> events{0};

Device device() { return Device(DeviceType::CUDA, 0); }
Stream stream(StreamId id) { return Stream(Stream::UNSAFE, device(), id); }

struct Guard : impl::DeviceGuardImplInterface {
  // One device, always the current one.
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device(); }
  Device exchangeDevice(Device) const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  // The current stream of each thread. Autograd sets that of a node's forward around the node's backward.
  Stream getStream(Device) const noexcept override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream exchangeStream(Stream next) const noexcept override {
    StreamId was = current;
    current = next.id();
    return stream(was);
  }

  // Autograd orders streams by events: between nodes of different streams, and at the end of a backward.
  void record(void** event, const Stream& on, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(++events);
    if (told_record) told_record(reinterpret_cast<long>(*event), on.id());
  }
  void block(void* event, const Stream& waits) const override {
    if (told_block) told_block(reinterpret_cast<long>(event), waits.id());
  }
  // What one stream has allocated and another reads: the allocator must not give it away before. A DataPtr is a member
  // of its storage, and a fake tensor's is empty; the storage is found by the place of that member.
  void recordDataPtrOnStream(const DataPtr& member, const Stream& on) const override {
    static const Storage any(Storage::use_byte_size_t(), 0, DataPtr());
    static const long offset = reinterpret_cast<long>(&any.data_ptr()) - reinterpret_cast<long>(any.unsafeGetStorageImpl());
    if (told_use) told_use(reinterpret_cast<long>(&member) - offset, on.id());
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}

  // Nothing is ever under way.
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());

}  // namespace

extern "C" long set_stream(long id) {
  long was = current;
  current = id;
  return was;
}
extern "C" long get_stream() { return current; }
extern "C" void tell(Told record, Told block, Told use) {
  told_record = record;
  told_block = block;
  told_use = use;
}

namespace at {

// torch finds this class by its name: CUDAHooks.
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  // Nothing is drawn, so a generator of the CPU serves.
  Generator getNewGenerator(DeviceIndex = -1) const override { return make_generator<CPUGeneratorImpl>(); }
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override {
    static Generator generator = make_generator<CPUGeneratorImpl>();
    return generator;
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
