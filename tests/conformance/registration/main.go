// Registers hawser-csi as a kubelet does: the same dial, the same calls, the
// same deadlines and the same order as pkg/kubelet/pluginmanager of Kubernetes,
// then asks the CSI endpoint for NodeGetInfo as pkg/volume/csi does.
//
// What is tested is the header that grpc-go sends: a dial of a bare path makes
// the escaped path the request's :authority, which HTTP/2 libraries elsewhere refuse.
//
// Usage: registration PATH-OF-HAWSER-CSI. Needs root. Exits 0 only if all is right.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	driverName = "csi.hawser.dev"
	nodeID     = "conformance-node"

	// operation_generator.go
	dialTimeout    = 10 * time.Second
	getInfoTimeout = 1 * time.Second
	notifyTimeout  = 5 * time.Second
	// csi_plugin.go
	csiTimeout = 2 * time.Minute
	// For what the driver does by itself.
	patience = 15 * time.Second
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: registration PATH-OF-HAWSER-CSI")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "registration:", err)
		os.Exit(1)
	}
	fmt.Println("registration: ok")
}

func run(binary string) (err error) {
	dir, err := os.MkdirTemp("", "hw-reg-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	socket := filepath.Join(dir, "k/plugins_registry", driverName+"-reg.sock")
	driver, err := start(binary, dir)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, stop(driver))
		if _, gone := os.Lstat(socket); !errors.Is(gone, os.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("%s: still there after SIGTERM", socket))
		}
	}()

	first, err := appears(socket, nil)
	if err != nil {
		return err
	}
	for _, dial := range []struct {
		how string
		to  func(string) (*grpc.ClientConn, error)
	}{{"DialContext, as kubelet", dialAsKubelet}, {"NewClient, passthrough", dialPassthrough}} {
		if err := register(socket, dial.to); err != nil {
			return fmt.Errorf("%s: %w", dial.how, err)
		}
		fmt.Printf("registered (%s)\n", dial.how)
	}

	// Refused, a plugin has to show up anew: kubelet does not ask the old socket again.
	if err := notify(socket, &registerapi.RegistrationStatus{Error: "conformance: refused once"}); err != nil {
		return fmt.Errorf("refusal: %w", err)
	}
	if _, err := appears(socket, first); err != nil {
		return fmt.Errorf("after a refusal: %w", err)
	}
	if err := register(socket, dialAsKubelet); err != nil {
		return fmt.Errorf("after a refusal: %w", err)
	}
	fmt.Println("registered again after a refusal")
	return nil
}

func start(binary, dir string) (*exec.Cmd, error) {
	driver := exec.Command(binary,
		"--kubelet-dir", filepath.Join(dir, "k"), "--driver-name", driverName, "--node-id", nodeID,
		"--pool", filepath.Join(dir, "pool"), "--state-dir", filepath.Join(dir, "state"),
		"--run-dir", filepath.Join(dir, "run"),
		// Nothing is staged here, so it is never started: any program will do. A keeper would outlive the driver.
		"--launcher", "process", "--volume-binary", binary, "--keeper-binary", "none")
	driver.Stdout, driver.Stderr = os.Stdout, os.Stderr
	return driver, driver.Start()
}

func stop(driver *exec.Cmd) error {
	if err := driver.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- driver.Wait() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(patience):
		return errors.Join(errors.New("the driver does not end at SIGTERM"), driver.Process.Kill())
	}
}

// appears waits for a socket that is not the one before.
func appears(socket string, before os.FileInfo) (os.FileInfo, error) {
	deadline := time.Now().Add(patience)
	for {
		found, err := os.Lstat(socket)
		if err == nil && found.Mode()&os.ModeSocket != 0 && (before == nil || found.ModTime() != before.ModTime()) {
			return found, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("%s: no new socket within %v (%v)", socket, patience, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// register does what kubelet does about a socket in plugins_registry.
func register(socket string, dial func(string) (*grpc.ClientConn, error)) error {
	conn, err := dial(socket)
	if err != nil {
		return fmt.Errorf("dial %s: %w", socket, err)
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), getInfoTimeout)
	defer cancel()
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return fmt.Errorf("GetInfo: %w", err)
	}
	fmt.Printf("type=%q name=%q endpoint=%q versions=%q\n", info.Type, info.Name, info.Endpoint, info.SupportedVersions)
	if info.Type != registerapi.CSIPlugin || info.Name != driverName {
		return fmt.Errorf("GetInfo: type %q, name %q", info.Type, info.Name)
	}
	if len(info.SupportedVersions) != 1 || info.SupportedVersions[0] != "1.0.0" {
		return fmt.Errorf("GetInfo: supported versions %q", info.SupportedVersions)
	}
	if err := nodeInfo(info.Endpoint); err != nil {
		return fmt.Errorf("NodeGetInfo at %s: %w", info.Endpoint, err)
	}
	return notifyOn(client, &registerapi.RegistrationStatus{PluginRegistered: true})
}

func notify(socket string, status *registerapi.RegistrationStatus) error {
	conn, err := dialAsKubelet(socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	return notifyOn(registerapi.NewRegistrationClient(conn), status)
}

func notifyOn(client registerapi.RegistrationClient, status *registerapi.RegistrationStatus) error {
	ctx, cancel := context.WithTimeout(context.Background(), notifyTimeout)
	defer cancel()
	if _, err := client.NotifyRegistrationStatus(ctx, status); err != nil {
		return fmt.Errorf("NotifyRegistrationStatus: %w", err)
	}
	return nil
}

// nodeInfo asks as kubelet's csi_client does: a connection of its own, authority localhost.
func nodeInfo(endpoint string) error {
	conn, err := grpc.NewClient("passthrough:///"+endpoint, grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dialUnix))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), csiTimeout)
	defer cancel()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	segments := info.GetAccessibleTopology().GetSegments()
	if info.NodeId != nodeID || segments["topology."+driverName+"/node"] != nodeID {
		return fmt.Errorf("node id %q, topology %v", info.NodeId, segments)
	}
	return nil
}

// dialAsKubelet is operation_generator.go's dial: no authority is given.
func dialAsKubelet(socket string) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	return grpc.DialContext(ctx, socket, //nolint:staticcheck // what kubelet calls
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithBlock(), //nolint:staticcheck
		grpc.WithContextDialer(dialUnix))
}

// dialPassthrough is the same target with the constructor that replaces DialContext.
func dialPassthrough(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dialUnix))
}

func dialUnix(ctx context.Context, address string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", address)
}
