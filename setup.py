"""The compiled part of the CPU backend; optional, so that the package installs without a C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "densemla.backends.cpu._native",
            sources=["src/densemla/backends/cpu/native.c"],
            depends=["src/densemla/backends/cpu/native.h", "src/densemla/backends/cpu/native_kernel.h"],
            extra_compile_args=["-O3", "-fno-math-errno", "-pthread", "-Wno-psabi"],
            extra_link_args=["-pthread", "-lm"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
