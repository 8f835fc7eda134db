extern "C" int npu_probe() { return 1; }
int x;
