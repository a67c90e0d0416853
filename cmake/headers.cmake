# Public headers: each compiles alone, all of them link together.

# A test whose first include is its header shows that this one compiles alone, unless the compiler is told of others before.
set(headers_alone ${mdkv_headers})
if(NOT mdkv_half_alone)
    set(first_includes ${library_tests} ${layer_tests})
    list(FILTER first_includes INCLUDE REGEX "${MDKV_TEST_SOURCES}")
    foreach(source IN LISTS first_includes)
        file(STRINGS "${source}" first REGEX "^#include" LIMIT_COUNT 1)
        string(REGEX REPLACE "^#include <(.*)>$" "\\1" first "${first}")
        list(REMOVE_ITEM headers_alone "${first}")
    endforeach()
endif()

# Of the others one source each, which includes the header twice and nothing else. Linking them into one program finds what is
# defined in a header without being inline.
set(header_check_sources "")
foreach(header IN LISTS headers_alone)
    string(MAKE_C_IDENTIFIER "${header}" name)
    set(source "${PROJECT_BINARY_DIR}/header_checks/${name}.cpp")
    file(GENERATE OUTPUT "${source}" CONTENT "#include <${header}>\n#include <${header}>\n")
    list(APPEND header_check_sources "${source}")
endforeach()
file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/header_checks/main.cpp" CONTENT "int main() {}\n")
add_executable(mdkv_header_checks ${header_check_sources} "${PROJECT_BINARY_DIR}/header_checks/main.cpp")
target_link_libraries(mdkv_header_checks PRIVATE mdkv::mdkv mdkv_warnings)
target_compile_options(mdkv_header_checks PRIVATE -O0)
add_test(NAME header_checks COMMAND mdkv_header_checks)
set_tests_properties(header_checks PROPERTIES LABELS compiler)
