# Tests that only run the compiler: sources that must not compile, and the code blocks of the documentation.

# The flags a consumer of mdkv::mdkv compiles with, in a response file both g++ and clang++ read.
set(consumer_flags "${PROJECT_BINARY_DIR}/consumer_flags.rsp")
# (The compiler's own folders named with -isystem would end the standard library's own #include_next.)
set(consumer_includes "$<FILTER:$<TARGET_PROPERTY:mdkv_header_checks,INCLUDE_DIRECTORIES>,EXCLUDE,^/usr(/local)?/include$>")
file(GENERATE OUTPUT "${consumer_flags}" CONTENT "-std=c++20\n-isystem \"$<JOIN:${consumer_includes},\"\n-isystem \">\"\n")

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/build/must_not_compile/*.cpp")
foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    add_test(NAME "must_not_compile/${name}" COMMAND "${CMAKE_COMMAND}" -DCOMPILER=${CMAKE_CXX_COMPILER}
        -DFLAGS=${consumer_flags} -DSOURCE=${source} -P "${PROJECT_SOURCE_DIR}/cmake/must_not_compile.cmake")
    set_tests_properties("must_not_compile/${name}" PROPERTIES LABELS compiler)
endforeach()

file(GLOB pages CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/README.md" "${PROJECT_SOURCE_DIR}/docs/*.md"
    "${PROJECT_SOURCE_DIR}/docs/lab/*/*.md")
add_test(NAME doc_blocks COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/cmake/doc_blocks.py"
    --compiler "${CMAKE_CXX_COMPILER}" --flags "${consumer_flags}" ${pages})
set_tests_properties(doc_blocks PROPERTIES TIMEOUT 900 COST 100) # the longest: starts first

# Sources compiled for different processors share no function whose code differs.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    add_test(NAME machines COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/cmake/machines.py"
        --compiler "${CMAKE_CXX_COMPILER}" --flags "${consumer_flags}" "${PROJECT_SOURCE_DIR}/tests/build/machines/stages.cpp")
    set_tests_properties(machines PROPERTIES LABELS compiler TIMEOUT 900 COST 50)
endif()
