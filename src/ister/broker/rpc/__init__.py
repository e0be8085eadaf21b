"""The broker's gRPC server: its ports, its two engines, and what every call has in common.

server              the gRPC and Flight ports, and which engine serves which
methods             a service's methods, the same for both engines
handlers            requests parsed, errors turned into statuses, calls counted
batch_calls         calls that are handled many at a time
grpcio_engine       the engine grpcio: TLS, client certificates, bidirectional streams
native_engine       the engine pygrpc-native, for plaintext: HTTP/2 in threads outside of Python
native_receivers    the threads that take calls from the native engine
native_writers      the threads that write to its streams
native_connections  the limits on its connections
native_support      whether the native engine can be used on this machine
forward_socket      the Unix socket over which the native engine forwards what it does not serve
"""
