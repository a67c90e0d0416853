# Public headers: each compiles alone and twice, all of them link together.

# One source per header that includes it twice and nothing else. Linking them into one program finds what is defined in
# a header without being inline.
set(header_check_sources "")
foreach(header IN LISTS mdkv_headers)
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
