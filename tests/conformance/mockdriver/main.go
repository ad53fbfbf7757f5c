// Serves csi-test's mock driver as kubelet expects a plugin: on one socket in
// plugins_registry that answers registration and CSI both, so that the endpoint
// it registers is empty (pkg/kubelet/pluginmanager then takes the socket itself).
//
// The mock driver lives in Kubernetes' own repository since csi-test v4.3. Its
// volumes are directories that it makes at the target path, and what it knows
// is in its memory; it serves neither attachments nor topology here.
//
// Usage: mockdriver SOCKET. Writes one line for each call to stdout: the method,
// the volume's id or "-", the gRPC code. Ends at SIGTERM.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/mock/service"
)

const driverName = "mock.csi.k8s.io"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: mockdriver SOCKET")
		os.Exit(2)
	}
	if err := serve(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "mockdriver:", err)
		os.Exit(1)
	}
}

func serve(socket string) error {
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.UnaryInterceptor(tell))
	mock := service.New(service.Config{DriverName: driverName, DisableAttach: true})
	csi.RegisterIdentityServer(server, mock)
	csi.RegisterControllerServer(server, mock)
	csi.RegisterNodeServer(server, mock)
	registerapi.RegisterRegistrationServer(server, registration{})
	ended, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		<-ended.Done()
		// Unlinks the socket too.
		server.Stop()
	}()
	return server.Serve(listener)
}

// registration says what kubelet asks of a socket that appeared.
type registration struct {
	registerapi.UnimplementedRegistrationServer
}

func (registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: driverName, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (registration) NotifyRegistrationStatus(
	_ context.Context, status *registerapi.RegistrationStatus,
) (*registerapi.RegistrationStatusResponse, error) {
	fmt.Printf("registered %v %q\n", status.PluginRegistered, status.Error)
	return &registerapi.RegistrationStatusResponse{}, nil
}

func tell(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	reply, err := handler(ctx, request)
	volume := "-"
	if named, ok := request.(interface{ GetVolumeId() string }); ok {
		volume = named.GetVolumeId()
	} else if created, ok := reply.(*csi.CreateVolumeResponse); ok && err == nil {
		volume = created.GetVolume().GetVolumeId()
	}
	fmt.Println(info.FullMethod, volume, status.Code(err))
	return reply, err
}
