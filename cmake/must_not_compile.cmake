# Script (cmake -DCOMPILER= -DFLAGS=<response file> -DSOURCE= -P): passes when SOURCE does not compile and the compiler
# says the phrase of its first line, `// expect: <phrase>`.
file(READ "${SOURCE}" text) # not file(STRINGS), which escapes semicolons
if(NOT text MATCHES "^// expect: ([^\n]+)\n")
    message(FATAL_ERROR "${SOURCE}: the first line must be `// expect: <phrase of the error>`")
endif()
set(phrase "${CMAKE_MATCH_1}")
execute_process(COMMAND "${COMPILER}" "@${FLAGS}" -fsyntax-only "${SOURCE}"
                RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
    message(FATAL_ERROR "${SOURCE} compiled; it should have failed with: ${phrase}")
endif()
string(FIND "${output}" "${phrase}" position)
if(position EQUAL -1)
    message(FATAL_ERROR "${SOURCE} failed to compile, but without the phrase `${phrase}`:\n${output}")
endif()
message(STATUS "refused as expected: ${phrase}")
