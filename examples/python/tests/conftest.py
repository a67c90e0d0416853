"""--device cuda: models and tensors of test_transformers.py and test_device.py lie on torch's CUDA device."""
import os


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"))


def pytest_configure(config):
    os.environ["MDKV_TEST_DEVICE"] = config.getoption("--device")
